"""The command line: its help is frozen here, errors are one line and say the way out."""

import argparse
import contextlib
import subprocess
import sys

import pytest

import tierstore
from tierstore import cli
from tierstore.train import RunConfig, config_file

HELP = {
    "": """
        usage: tierstore [-h] [--version] COMMAND ...
        Embedding tables larger than memory: train a model on them, look into them, check them.
        options:
          -h, --help  show this help message and exit
          --version   show program's version number and exit
        commands:
          COMMAND
            train     train a DLRM as a run file says
            demo      train on tables that do not fit the budget, and compare
            inspect   say what a store holds
            verify    check every row of a store
            rollback  go back to a version that the store kept
            repair    save what is sound of a damaged store
            compact   copy a store without the room it no longer needs
            trace     write down which rows a run looks up
            export    write tables to a safetensors file or torch checkpoint
            import    take tables from safetensors files or torch checkpoints
            quantize  make a store for inference, its rows in fewer bytes
            serve     answer requests for rows and predictions
            publish   send what changed in a store to servers
            plan      say what machines a workload needs, before they are bought
    """,
    "train": """
        usage: tierstore train [-h] [--data PATH] [--store DIR] [--ddr SIZE] [--hbm SIZE] [--device NAME]
                               [--policy NAME] [--threads N] [--record FILE.npz] [--record-rate X]
                               [--prefetch-depth N] [--epochs N] [--set SECTION.KEY=VALUE] [--resume]
                               [--json PATH] [--no-bits] [--keys] [--traceback]
                               [FILE.toml]
        Train a DLRM as a run file says. A flag overrides the key behind it. Ctrl-C commits and says how to resume.
        positional arguments:
          FILE.toml             the run file
        options:
          -h, --help            show this help message and exit
          --data PATH           file or folder to train on (data.path)
          --store DIR           folder of the store (store.path)
          --ddr SIZE            memory for rows, as "512MiB", "50%" or "5% of tables" (store.ddr)
          --hbm SIZE            GPU memory for rows, written as --ddr is; 0: none (store.hbm)
          --device NAME         where the model computes: cpu, or cuda beside --hbm (store.device)
          --policy NAME         which rows leave memory first: lru, lfu, tinylfu or lookahead
                                (store.policy)
          --threads N           threads of the store (store.threads)
          --record FILE.npz     record which rows are looked up, for tierstore plan (store.record)
          --record-rate X       share of the rows that is recorded (store.record_rate)
          --prefetch-depth N    batches whose rows are fetched ahead; 0: none (train.prefetch_depth)
          --epochs N            times through the training rows (train.epochs)
          --set SECTION.KEY=VALUE
                                set any key, as train.batch_size=512
          --resume              continue from the last commit of the store, if any
          --json PATH           write what the run did and ended in to a file
          --no-bits             with --json: do not read every row to digest its bits
          --keys                print every key with its default, and exit
          --traceback           show where in the code an error arose
    """,
    "demo": """
        usage: tierstore demo [-h] [--dir DIR] [--device NAME] [--hbm SIZE] [--traceback]
        Generate click data, train on it with a tenth of the memory its rows need, then with all of it, and compare.
        options:
          -h, --help     show this help message and exit
          --dir DIR      where to work; emptied first (default: .demo)
          --device NAME  where to compute: cpu (default) or cuda
          --hbm SIZE     GPU memory for rows (default: a twentieth of what training touches; none on the cpu)
          --traceback    show where in the code an error arose
    """,
    "inspect": """
        usage: tierstore inspect [-h] [--traceback] DIR
        Say what a store holds. Nothing is changed.
        positional arguments:
          DIR          folder of the store
        options:
          -h, --help   show this help message and exit
          --traceback  show where in the code an error arose
    """,
    "verify": """
        usage: tierstore verify [-h] [--traceback] DIR
        Read every stored row, check it against its checksum and the counts against the manifest. Nothing is changed.
        positional arguments:
          DIR          folder of the store
        options:
          -h, --help   show this help message and exit
          --traceback  show where in the code an error arose
    """,
    "rollback": """
        usage: tierstore rollback [-h] [--traceback] DIR VERSION
        Make a kept version the current one again. Later versions are dropped. A run keeps versions with store.keep.
        positional arguments:
          DIR          folder of the store
          VERSION      one that tierstore inspect DIR lists as kept
        options:
          -h, --help   show this help message and exit
          --traceback  show where in the code an error arose
        example:
          tierstore inspect shop
          tierstore rollback shop 12
    """,
    "repair": """
        usage: tierstore repair [-h] [--manifest FILE] [--stale-ok] [--traceback] DIR NEW_DIR
        Save every sound row of a damaged store's last version into a new store, and list what was lost. The exit
        status is 1 if anything was.
        positional arguments:
          DIR              folder of the damaged store; only read
          NEW_DIR          folder of the new store; must not exist, or be empty
        options:
          -h, --help       show this help message and exit
          --manifest FILE  a copy of manifest.json, where that of DIR cannot be read
          --stale-ok       take blocks too that may be of an earlier version, and count them
          --traceback      show where in the code an error arose
        example:
          tierstore repair shop shop-repaired
    """,
    "compact": """
        usage: tierstore compact [-h] [--trace FILE.npz] [--traceback] DIR NEW_DIR
        Copy all versions kept, blocks in order of their rows, without free pages; then verify the copy. DIR is not
        changed.
        positional arguments:
          DIR               folder of the store
          NEW_DIR           folder of the copy; must not exist, or be empty
        options:
          -h, --help        show this help message and exit
          --trace FILE.npz  put rows side by side that this trace, of tierstore trace, reads together
          --traceback       show where in the code an error arose
        examples:
          tierstore compact shop shop-compact
          tierstore compact shop shop-packed --trace shop.npz
    """,
    "trace": """
        usage: tierstore trace [-h] [--data PATH] [--rows N] [--force] [--traceback] FILE.toml OUT.npz
        Read the training rows of a run file and write which rows of which table they look up, for tierstore compact.
        positional arguments:
          FILE.toml    the run file
          OUT.npz      file to write; it appears when it is complete
        options:
          -h, --help   show this help message and exit
          --data PATH  file or folder to read (data.path)
          --rows N     of the data, from the start (default: data.train_rows)
          --force      replace OUT if it exists
          --traceback  show where in the code an error arose
        example:
          tierstore trace shop.toml shop.npz
          tierstore compact shop shop-packed --trace shop.npz
    """,
    "export": """
        usage: tierstore export [-h] [--format NAME] [--table NAME] [--key TEXT] [--state] [--dense]
                                [--at VERSION] [--force] [--ddr SIZE] [--traceback]
                                DIR OUT
        Write every row of a store's tables to one file. Nothing is changed; training may go on meanwhile.
        positional arguments:
          DIR            folder of the store
          OUT            file to write; it appears when it is complete
        options:
          -h, --help     show this help message and exit
          --format NAME  safetensors (default) or torch
          --table NAME   a table to export; default: all
          --key TEXT     name of a table's tensor, {table} being the table's name (default:
                         embedding_bags.{table}.weight)
          --state        add the optimizer state, as sum, exp_avg, exp_avg_sq
          --dense        add the dense tensors of the commit, under their names
          --at VERSION   a version that the store keeps; default: the last
          --force        replace OUT if it exists
          --ddr SIZE     memory for rows (default: 256MiB)
          --traceback    show where in the code an error arose
        examples:
          tierstore export shop shop.safetensors
          tierstore export shop item.pt --format torch --table item --key weight
          tierstore export shop whole.safetensors --state --dense
    """,
    "import": """
        usage: tierstore import [-h] [--map KEY=TABLE] [--optimizer NAME] [--lr X] [--eps X] [--weight-decay X]
                                [--pooling NAME] [--rounding NAME] [--dtype NAME] [--ddr SIZE] [--traceback]
                                DIR FILE [FILE ...]
        Take tables from files, and commit once all rows are there. A run cut short changes nothing; repeat it.
        positional arguments:
          DIR               folder of the store; made if it is not there
          FILE              safetensors files or torch checkpoints
        options:
          -h, --help        show this help message and exit
          --map KEY=TABLE   take tensor KEY as table TABLE, and no tensor that is not so named
          --dtype NAME      convert weights to float32, float16 or bfloat16 (default: as in the file)
          --ddr SIZE        memory for rows (default: 256MiB)
          --traceback       show where in the code an error arose
        new tables:
          what the file does not say; tables that are there keep theirs
          --optimizer NAME  sgd, rowwise_adagrad, adagrad or adam (default: sgd)
          --lr X            its learning rate
          --eps X           its eps
          --weight-decay X  its L2 penalty
          --pooling NAME    sum, mean or max (default: sum)
          --rounding NAME   of training: nearest or stochastic (default: nearest)
        examples:
          tierstore import shop shop.safetensors
          tierstore import shop item.pt --map weight=item --optimizer rowwise_adagrad --lr 0.05
          tierstore import shop part-1.safetensors part-2.safetensors --dtype bfloat16
    """,
    "quantize": """
        usage: tierstore quantize [-h] --dtype NAME [--table NAME] [--at VERSION] [--traceback] DIR NEW_DIR
        Copy a store's tables in another dtype, without optimizer state, into a new store; then verify it. int8 and
        int4 rows are looked up, not trained. DIR is not changed.
        positional arguments:
          DIR           folder of the trained store
          NEW_DIR       folder of the new store; must not exist, or be empty
        options:
          -h, --help    show this help message and exit
          --dtype NAME  int8, int4, float16 or bfloat16
          --table NAME  a table to convert; default: all. The others stay as they are
          --at VERSION  a version that the store keeps; default: the last
          --traceback   show where in the code an error arose
        examples:
          tierstore quantize shop shop-int8 --dtype int8
          tierstore quantize shop shop-mixed --dtype int4 --table item --table user
    """,
    "serve": """
        usage: tierstore serve [-h] [--store DIR] [--ddr SIZE] [--dtype NAME] [--policy NAME] [--threads N]
                               [--host TEXT] [--port N] [--grpc-port N] [--admin-host TEXT] [--admin-port N]
                               [--workers N] [--max-batch-samples N] [--max-delay-us N] [--max-queue-samples N]
                               [--max-queue-requests N] [--request-seconds SECONDS] [--body-bytes N]
                               [--connections N] [--receive-seconds SECONDS] [--out-of-range TEXT]
                               [--pooled-cache SIZE] [--warm-up TEXT] [--record FILE.npz] [--record-rate X]
                               [--follow-seconds SECONDS] [--updates]
                               [--grace-seconds SECONDS] [--token-file TEXT] [--tls-certificate TEXT]
                               [--tls-key TEXT] [--log-level TEXT] [--log-text] [--traceback]
                               [FILE.toml]
        Serve the store's tables as lookups and, if tierstore train wrote it, its model, by the Open Inference
          Protocol over REST and gRPC. It follows the trainer's commits. SIGTERM ends it once requests are answered.
        positional arguments:
          FILE.toml             settings; keys as the flags, with _ for -
        options:
          -h, --help            show this help message and exit
          --store DIR           folder of the store; with --updates it need not exist yet
          --ddr SIZE            memory for rows: bytes, "2GiB", "50%" of the machine's or "5% of tables" (default:
                                50%)
          --dtype NAME          what rows are kept in memory as: "stored", or fewer bits: "float16", "bfloat16",
                                "int8", "int4" (default: stored)
          --policy NAME         which rows leave memory first: lru, lfu or tinylfu (default: lru)
          --threads N           threads of a lookup and of the model; 0: the CPUs there are but one, shared by
                                workers
          --host TEXT           address that REST and gRPC listen on; 0.0.0.0 for all (default: 127.0.0.1)
          --port N              port of REST; 0: any that is free (default: 8000)
          --grpc-port N         port of gRPC; 0: any that is free, -1: no gRPC (default: 8001)
          --admin-host TEXT     address of status page, metrics and admin calls; others need --token-file
                                (default: 127.0.0.1)
          --admin-port N        their port; 0: any that is free, -1: none. With workers, worker i takes port + i
                                (default: 8002)
          --workers N           processes that share the ports; each takes its part of --ddr (default: 1)
          --max-batch-samples N
                                samples of a batch, and of a request (default: 4096)
          --max-delay-us N      microseconds a request may wait for company while nothing runs
          --max-queue-samples N
                                samples that may wait for a model; more are refused (503) (default: 65536)
          --max-queue-requests N
                                requests that may wait for a model; more are refused (503) (default: 4096)
          --request-seconds SECONDS
                                a request that gives no deadline has this one (default: 10.0)
          --body-bytes N        longest request (default: 67108864)
          --connections N       connections at a time, of REST and of gRPC each (default: 1000)
          --receive-seconds SECONDS
                                time for a request to arrive whole (default: 30.0)
          --out-of-range TEXT   "reject": ids that are no rows are an error; "zero": they count as rows of zeros,
                                and are counted (default: reject)
          --pooled-cache SIZE   memory, beside --ddr, for pooled rows of bags asked for again; 0: none
          --warm-up TEXT        rows to have in memory before the server is ready: "auto": those of its last run,
                                "none", or a trace of tierstore trace (default: auto)
          --record FILE.npz     file to record in which rows are looked up, for tierstore plan; workers add their
                                number
          --record-rate X       share of the rows that is recorded; less once the recording has 64 MiB (default:
                                0.01)
          --follow-seconds SECONDS
                                how often to look for a newer commit; 0: never (default: 0.05)
          --updates             take updates of tierstore publish on the admin port; the store is then a replica
          --grace-seconds SECONDS
                                on SIGTERM, time for requests under way to finish (default: 30.0)
          --token-file TEXT     file with the bearer token that requests must carry; health stays open
          --tls-certificate TEXT
                                certificate chain in PEM, for TLS on all ports
          --tls-key TEXT        its key
          --log-level TEXT      what to log: debug, info, warning, error (default: info)
          --log-text            log plain lines instead of JSON
          --traceback           show where in the code an error arose
        examples:
          tierstore serve --store shop --ddr 2GiB
          tierstore serve --store shop --dtype int8 --workers 2
          tierstore serve --store replica --updates
          tierstore serve serve.toml --port 9000
    """,
    "publish": """
        usage: tierstore publish [-h] [--to URL] [--since VERSION] [--token-file PATH] [--dry-run] [--keep-file PATH]
                                 [--traceback] DIR
        Send the rows that changed since a version, and the dense weights, to the admin ports of servers. Each applies
        them as one version. An upload that was cut short goes on where it stopped: publish again. The exit status is 1
        if any server failed.
        positional arguments:
          DIR                folder of the store; may be trained on meanwhile
        options:
          -h, --help         show this help message and exit
          --to URL           admin port of a server, as http://HOST:8002; repeatable
          --since VERSION    send what changed since it (default: since what each server has)
          --token-file PATH  file with the servers' admin token
          --dry-run          say what would be sent, and send nothing
          --keep-file PATH   keep the file that is sent under this name
          --traceback        show where in the code an error arose
        examples:
          tierstore publish shop --to http://replica-1:8002 --to http://replica-2:8002
          tierstore publish shop --since 12 --dry-run
    """,
}


def parsers():
    parser = cli.build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {"": parser, **commands.choices}


@pytest.mark.parametrize("name", HELP)
def test_help_is_frozen(name):
    # Python's versions break lines differently.
    assert parsers()[name].format_help().split() == HELP[name].split()


def test_every_command_is_frozen_here():
    # tests/plan/test_command.py has those of plan.
    assert list(parsers()) == [*HELP, "plan"]


def test_every_flag_of_train_that_stands_for_a_key_names_a_real_one():
    known = config_file.to_dict(RunConfig())
    for flag in cli._TRAIN_FLAGS:
        section, _, key = flag.key.partition(".")
        assert key in known[section]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["trian"], 2, "tierstore: unknown command 'trian'; did you mean 'train'?\n"),
        (["qqq"], 2, "tierstore: unknown command 'qqq'; commands are train, demo, inspect, verify, "),
        (["train"], 2, "tierstore: give a run file: tierstore train FILE.toml; --keys prints one with all keys\n"),
        (["train", "nosuch.toml"], 2, "tierstore: nosuch.toml: there is no such run file\n"),
        (["inspect", "nosuch"], 1, "tierstore: no store at "),
        (["verify", "nosuch"], 1, "tierstore: no store at "),
        (["rollback", "nosuch", "1"], 1, "tierstore: no store at "),
        (["compact", "nosuch", "new"], 1, "tierstore: no store at "),
        (["export", "nosuch", "out"], 1, "tierstore: no store at "),
        (["export", "nosuch", "out", "--at", "0"], 2, "tierstore: version=0 must be in "),
        (["export", "nosuch", "out", "--format", "safetensor"], 2, "tierstore: --format safetensor: did you mean "),
        (["import", "new", "nosuch"], 1, "tierstore: [Errno 2] No such file or directory: "),
        (["import", "new", "f", "--map", "weight"], 2, "tierstore: --map weight: write KEY=TABLE, as --map model.item"),
        (["import", "new", "f", "--map", "a=b", "--map", "a=c"], 2, "tierstore: --map names 'a' twice, as 'b' and 'c'"),
        (["import", "new", "f", "--optimizer", "adm"], 2, "tierstore: --optimizer adm: did you mean 'adam'?\n"),
        (["import", "new", "f", "--optimizer", "x"], 2, "tierstore: --optimizer x: choose from sgd, rowwise_adagrad, "),
        (["import", "new", "f", "--lr", "0.1"], 2, "tierstore: --lr goes with --optimizer NAME; give both\n"),
        (
            ["import", "new", "f", "--optimizer", "sgd", "--eps", "1"],
            2,
            "tierstore: --eps: sgd has no eps; it has lr, ",
        ),
        (["import", "new", "f", "--optimizer", "sgd", "--lr", "-1"], 2, "tierstore: SGD: lr=-1.0 must be finite"),
        (["import", "new", "f", "--dtype", "float61"], 2, "tierstore: --dtype float61: did you mean 'float16'?\n"),
        (["import", "new", "f", "--pooling", "men"], 2, "tierstore: --pooling men: did you mean 'mean'?\n"),
    ],
)
def test_errors_are_one_line_with_a_status(arguments, status, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == status
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert errors.count("\n") == 1


def test_no_command_prints_the_help(capsys):
    assert cli.main([]) == 2
    assert "usage: tierstore" in capsys.readouterr().out


def test_traceback_shows_where_an_error_arose(tmp_path):
    with pytest.raises(tierstore.errors.StoreNotFoundError):
        cli.main(["inspect", str(tmp_path / "nosuch"), "--traceback"])


def test_keys_is_a_run_file_of_all_defaults(capsys, tmp_path):
    assert cli.main(["train", "--keys"]) == 0
    path = tmp_path / "run.toml"
    path.write_text(capsys.readouterr().out)
    assert config_file.load(path) == RunConfig()


def overrides(*arguments):
    options = cli.build_parser().parse_args(["train", "run.toml", *arguments])
    return [(section, key, value) for section, key, value, _ in cli._overrides(options)]


def test_flags_become_overrides_and_win_over_set():
    assert overrides("--epochs", "3", "--set", "train.epochs=2", "--ddr", "1024", "--data", "7") == [
        ("train", "epochs", 2),
        ("data", "path", "7"),
        ("store", "ddr", "1024"),
        ("train", "epochs", 3),
    ]
    assert overrides("--prefetch-depth", "0") == [("train", "prefetch_depth", 0)]
    assert overrides("--device", "cuda:1", "--hbm", "5% of tables") == [
        ("store", "hbm", "5% of tables"),
        ("store", "device", "cuda:1"),
    ]


@pytest.mark.parametrize(
    ("arguments", "device", "hbm"),
    [([], "cpu", None), (["--device", "cuda", "--hbm", "1MiB"], "cuda", "1MiB"), (["--hbm", "0"], "cpu", "0")],
)
def test_demo_hands_over_its_device(arguments, device, hbm, monkeypatch):
    from tierstore.train import demo

    given = {}
    monkeypatch.setattr(demo, "run_demo", lambda directory, **rest: given.update(rest) or True)
    assert cli.main(["demo", *arguments]) == 0
    assert (given["device"], given["hbm"]) == (device, hbm)


def test_a_wrong_flag_is_named_with_its_key(tmp_path, capsys):
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    assert cli.main(["train", str(run_file), "--epochs", "0"]) == 2
    expected = f"expected 1 or more, up to {2**63 - 1}"
    assert capsys.readouterr().err == f"tierstore: --epochs 0: train.epochs = 0: {expected}\n"


@pytest.fixture
def store_with_rows(store_dir):
    import torch

    with tierstore.open(store_dir, mode="w", ddr="8MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=1000, embedding_dim=8))
        table.write(torch.arange(10), torch.ones(10, 8))
        store.commit(extra={"note": "hello"}, tensors={"dense": torch.zeros(3, 2)})
    return store_dir


def test_inspect_says_what_a_store_holds(store_with_rows, capsys):
    assert cli.main(["inspect", str(store_with_rows)]) == 0
    output = capsys.readouterr().out
    assert f"{store_with_rows}: version 1, 1 tables" in output
    assert "item  1,000 x 8 float32, sgd, 31.2 KiB if all in memory" in output
    assert "manifest.json" in output
    assert "1 tensors, 24 B" in output
    assert '{"note": "hello"}' in output


def test_verify_says_what_it_checked_and_finds_damage(store_with_rows, capsys):
    assert cli.main(["verify", str(store_with_rows)]) == 0
    assert "version 1 is sound: 10 rows in 1 blocks of 1 tables" in capsys.readouterr().out
    (path,) = store_with_rows.glob("*.lmdb")
    data = bytearray(path.read_bytes())
    place = data.find(b"\x00\x00\x80\x3f" * 8)
    assert place > 0
    while place >= 0:
        data[place] ^= 1
        place = data.find(b"\x00\x00\x80\x3f" * 8, place + 1)
    path.write_bytes(data)
    assert cli.main(["verify", str(store_with_rows)]) == 1
    assert str(path) in capsys.readouterr().err


def test_repair_saves_what_is_sound_and_lists_what_is_not(store_with_rows, tmp_path, capsys):
    assert cli.main(["repair", str(store_with_rows), str(tmp_path / "whole")]) == 0
    assert "version 1, 10 rows saved and verified; nothing was lost" in capsys.readouterr().out
    (path,) = store_with_rows.glob("*.lmdb")
    data = bytearray(path.read_bytes())
    place = data.find(b"\x00\x00\x80\x3f" * 8)
    while place >= 0:
        data[place] ^= 1
        place = data.find(b"\x00\x00\x80\x3f" * 8, place + 32)
    path.write_bytes(data)
    assert cli.main(["repair", str(store_with_rows), str(tmp_path / "part")]) == 1
    said = capsys.readouterr().out
    assert f"all listed in {tmp_path / 'part' / 'lost.txt'}" in said
    assert "table 'item': rows 0 to " in said
    with tierstore.open(tmp_path / "part", mode="r", ddr="1MiB") as store:
        assert store.extra == {"note": "hello"}


def test_the_module_runs_and_closes_quietly_when_nobody_reads(tmp_path):
    finished = subprocess.run(
        [sys.executable, "-m", "tierstore", "--version"], capture_output=True, text=True, check=True
    )
    assert finished.stdout == f"tierstore {tierstore.__version__}\n"


def test_a_store_without_a_commit_says_so_and_long_extra_is_cut(store_dir, capsys):
    with tierstore.open(store_dir, mode="w", ddr="8MiB") as store:
        store.create_table(tierstore.TableConfig(name="item", num_embeddings=1000, embedding_dim=8))
    for command in ("inspect", "verify"):
        assert cli.main([command, str(store_dir)]) == 0
        assert "nothing committed yet" in capsys.readouterr().out
    with tierstore.open(store_dir, mode="w", ddr="8MiB") as store:
        store.commit(extra={"note": "x" * 1000})
    assert cli.main(["inspect", str(store_dir)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 210


def test_tables_go_to_a_file_and_into_another_store(store_with_rows, tmp_path, capsys):
    store, out, copy = str(store_with_rows), str(tmp_path / "out.pt"), str(tmp_path / "copy")
    assert cli.main(["export", store, out, "--format", "torch", "--dense", "--table", "item"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: version 1, 1,000 rows in 2 tensors, {(tmp_path / 'out.pt').stat().st_size / 1024:.1f} KiB",
        "  embedding_bags.item.weight",
        "  dense",
    ]
    assert cli.main(["export", store, out]) == 1
    assert "out.pt exists; choose another name, or overwrite it with --force\n" in capsys.readouterr().err
    assert cli.main(["export", store, out, "--table", "itm", "--force"]) == 1
    assert "did you mean 'item'?" in capsys.readouterr().err
    assert cli.main(["import", copy, out]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{copy}: version 1",
        "  item: new, 1,000 rows, 10 changed",
        "  not taken: dense",
    ]


def test_foreign_tensors_become_tables_with_the_optimizer_asked_for(tmp_path, capsys):
    import torch

    rows = torch.ones(20, 4)
    rows[3, 1] = float("nan")
    torch.save({"weight": rows, **{f"other{number}": torch.ones(2) for number in range(30)}}, tmp_path / "bag.pt")
    arguments = ["import", str(tmp_path / "new"), str(tmp_path / "bag.pt"), "--map", "weight=item"]
    optimizer = ["--optimizer", "adagrad", "--lr", "0.25", "--eps", "1e-3", "--weight-decay", "0.5"]
    assert cli.main([*arguments, *optimizer, "--pooling", "max", "--dtype", "float16", "--ddr", "8MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["  item: new, 20 rows, 20 changed", "    1 values are NaN or infinite"]
    assert lines[-1] == "  not taken: 20 more"
    with tierstore.open(tmp_path / "new", mode="r", ddr="8MiB") as store:
        config = store["item"].config
    assert config.optimizer == tierstore.optim.Adagrad(lr=0.25, eps=1e-3, weight_decay=0.5)
    assert (config.pooling, config.dtype) == ("max", "float16")


def test_compact_says_what_it_saved(store_with_rows, tmp_path, capsys):
    copy = tmp_path / "compact"
    assert cli.main(["compact", str(store_with_rows), str(copy)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{copy}: version 1, 10 rows in 1 blocks, verified; ")
    assert said.endswith(" after\n")
    assert cli.main(["compact", str(store_with_rows), str(copy)]) == 1
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "compact"])
def test_an_interrupted_command_leaves_nothing(command, store_with_rows, tmp_path, capsys, monkeypatch):
    from tierstore import commands

    def interrupt(done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "byte_bar", lambda what: contextlib.nullcontext(interrupt))
    assert cli.main([command, str(store_with_rows), str(tmp_path / "out")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [store_with_rows.name]


def test_the_command_line_loads_nothing_before_a_command_runs():
    code = """
import sys, tierstore
before = set(sys.modules)
import tierstore.cli
tierstore.cli.build_parser()
print(*sorted(name for name in set(sys.modules) - before if name.startswith(("tierstore", "tqdm"))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    light = ("", ".command", ".config", ".messages", ".waiting_threads")
    of_serve = ["tierstore.serve" + name for name in light]
    of_all = ["tierstore.cli", "tierstore.commands", "tierstore.names", "tierstore.options"]
    assert done.stdout.split() == [*of_all, *of_serve]


def test_rollback_of_the_command_line(tmp_path, capsys):
    with tierstore.open(tmp_path / "shop", keep=3) as store:
        for number in range(4):
            store.commit(extra={"n": number})
    assert cli.main(["inspect", str(tmp_path / "shop")]) == 0
    assert "version 4 (kept too: 2, 3)" in capsys.readouterr().out
    assert cli.main(["rollback", str(tmp_path / "shop"), "1"]) == 2
    assert "is not kept; there are 2, 3, 4" in capsys.readouterr().err
    assert cli.main(["rollback", str(tmp_path / "shop"), "2"]) == 0
    assert "version 2 is the current one" in capsys.readouterr().out
    with tierstore.open(tmp_path / "shop", mode="r") as store:
        assert (store.versions, store.extra) == ((2,), {"n": 1})
