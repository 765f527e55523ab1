"""The help of every command is frozen here."""

import argparse

import pytest

from tierstore.cli import entry as cli

EVERYWHERE = ("-h, --help show this help message and exit ", "--traceback show where in the code an error arose ")
HELP = {
    "": """
        usage: tierstore [-h] [--version] COMMAND ...
        Embedding tables larger than memory: train a model on them, look into them, check them.
        options:
          --version   show program's version number and exit
        commands:
          COMMAND
            train     train a DLRM as a run file says
            demo      train on tables that do not fit the budget, and compare
            inspect   say what a store holds
            verify    check every row of a store
            rollback  go back to a version that the store kept
            repair    save what is sound of a damaged store
            backup    copy a store while it is trained on
            compact   copy a store without the room it no longer needs
            reshard   copy a store for another number of ranks, or for none
            trace     write down which rows a run looks up
            export    write tables to a safetensors file, torch checkpoint or Parquet file
            import    take tables from safetensors files or torch checkpoints
            quantize  make a store for inference, its rows in fewer bytes
            serve     answer requests for rows and predictions
            publish   send what changed in a store to servers
            warm-up   compile all kernels now, as for a container image
            plan      say what machines a workload needs, before they are bought
    """,
    "train": """
        usage: tierstore train [-h] [--data PATH] [--store DIR] [--ddr SIZE] [--hbm SIZE] [--device NAME]
                               [--policy NAME] [--threads N] [--record FILE.npz] [--record-rate X]
                               [--prefetch-depth N] [--epochs N] [--set SECTION.KEY=VALUE] [--resume]
                               [--json PATH] [--html PATH] [--no-bits] [--keys] [--traceback]
                               [FILE.toml]
        Train a DLRM as a run file says. A flag overrides the key behind it. Ctrl-C commits and says how to resume.
        positional arguments:
          FILE.toml             the run file
        options:
          --data PATH           file or folder to train on (data.path)
          --store DIR           folder of the store (store.path)
          --ddr SIZE            memory for rows, as "512MiB", "50%" or "5% of tables" (store.ddr)
          --hbm SIZE            GPU memory for rows, written as --ddr is; 0: none (store.hbm)
          --device NAME         where the model computes: cpu, or cuda beside --hbm (store.device)
          --policy NAME         which rows leave memory first: auto, lru, lfu, tinylfu or
                                lookahead (store.policy)
          --threads N           threads of the store (store.threads)
          --record FILE.npz     record which rows are looked up, for tierstore plan (store.record)
          --record-rate X       share of the rows that is recorded (store.record_rate)
          --prefetch-depth N    batches whose rows are fetched ahead; 0: none (train.prefetch_depth)
          --epochs N            times through the training rows (train.epochs)
          --set SECTION.KEY=VALUE
                                set any key, as train.batch_size=512
          --resume              continue from the last commit of the store, if any
          --json PATH           write what the run did and ended in to a file
          --html PATH           write a page with plots of loss, hit rate, reads and writes a step
          --no-bits             with --json: do not read every row to digest its bits
          --keys                print every key with its default, and exit
    """,
    "demo": """
        usage: tierstore demo [-h] [--dir DIR] [--device NAME] [--hbm SIZE] [--ranks N] [--traceback]
        Generate click data, train on it with a tenth of the memory its rows need, then with all of it, and compare.
        options:
          --dir DIR      where to work; emptied first (default: .demo)
          --device NAME  where to compute: cpu (default) or cuda
          --hbm SIZE     GPU memory for rows (default: a twentieth of what training touches; none on the cpu)
          --ranks N      processes that share the tables (default: 1)
    """,
    "inspect": """
        usage: tierstore inspect [-h] [--traceback] DIR
        Say what a store holds. Nothing is changed.
        positional arguments:
          DIR          folder of the store
        options:
    """,
    "verify": """
        usage: tierstore verify [-h] [--traceback] DIR
        Read every stored row, check it against its checksum and the counts against the manifest. Nothing is changed.
        positional arguments:
          DIR          folder of the store
        options:
    """,
    "rollback": """
        usage: tierstore rollback [-h] [--traceback] DIR VERSION
        Make a kept version the current one again. Later versions are dropped. A run keeps versions with store.keep.
        positional arguments:
          DIR          folder of the store
          VERSION      one that tierstore inspect DIR lists as kept
        options:
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
          --manifest FILE  a copy of manifest.json, where that of DIR cannot be read
          --stale-ok       take rows too that may be of an earlier version, and count them
        example:
          tierstore repair shop shop-repaired
    """,
    "backup": """
        usage: tierstore backup [-h] [--verify] [--traceback] DIR NEW_DIR
        Copy all versions that a store keeps, as of its last commit, page by page. DIR is not changed. A backup that
        was cut short is no store; run the command again.
        positional arguments:
          DIR          folder of the store; may be trained on meanwhile
          NEW_DIR      folder of the backup; must not exist, or be empty
        options:
          --verify     read the backup and check every row
        examples:
          tierstore backup shop /backups/shop-monday
          tierstore backup shop /backups/shop-monday --verify
    """,
    "compact": """
        usage: tierstore compact [-h] [--trace FILE.npz] [--traceback] DIR NEW_DIR
        Copy all versions kept, rows in order of their numbers, without free pages; then verify the copy. DIR is not
        changed.
        positional arguments:
          DIR               folder of the store
          NEW_DIR           folder of the copy; must not exist, or be empty
        options:
          --trace FILE.npz  put rows side by side that this trace, of tierstore trace, reads together
        examples:
          tierstore compact shop shop-compact
          tierstore compact shop shop-packed --trace shop.npz
    """,
    "reshard": """
        usage: tierstore reshard [-h] [--ranks N] [--plan FILE] [--plain] [--traceback] DIR NEW_DIR
        Copy the last commit of a store for tierstore.dist.open_sharded in so many ranks, or with --plain for
        tierstore.open in one process: rows, optimizer state, and rank 0's extra and tensors. DIR is not changed.
        positional arguments:
          DIR          folder of the store, sharded (with all ranks' parts) or not
          NEW_DIR      folder of the copy; must not exist, or be empty, or hold what a killed reshard left
        options:
          --ranks N    make a part for each of so many ranks (default: 1)
          --plan FILE  how tables are sharded, a file of tierstore.dist.Plan
          --plain      make a store that is not sharded
        examples:
          tierstore reshard shop shop-sharded --ranks 4
          tierstore reshard shop-sharded shop-again --plain
    """,
    "trace": """
        usage: tierstore trace [-h] [--data PATH] [--rows N] [--force] [--traceback] FILE.toml OUT.npz
        Read the training rows of a run file and write which rows of which table they look up, for tierstore compact.
        positional arguments:
          FILE.toml    the run file
          OUT.npz      file to write; it appears when it is complete
        options:
          --data PATH  file or folder to read (data.path)
          --rows N     of the data, from the start (default: data.train_rows)
          --force      replace OUT if it exists
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
          --format NAME  safetensors (default), torch, or parquet: rows of one table
          --table NAME   a table to export; default: all
          --key TEXT     name of a table's tensor, {table} being the table's name (default:
                         embedding_bags.{table}.weight)
          --state        add the optimizer state, as sum, exp_avg, exp_avg_sq
          --dense        add the dense tensors of the commit, under their names
          --at VERSION   a version that the store keeps; default: the last
          --force        replace OUT if it exists
          --ddr SIZE     memory for rows (default: 256MiB)
        examples:
          tierstore export shop shop.safetensors
          tierstore export shop item.pt --format torch --table item --key weight
          tierstore export shop whole.safetensors --state --dense
          tierstore export shop item.parquet --format parquet --table item
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
          --map KEY=TABLE   take tensor KEY as table TABLE, and no tensor that is not so named
          --dtype NAME      convert weights to float32, float16 or bfloat16 (default: as in the file)
          --ddr SIZE        memory for rows (default: 256MiB)
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
          --dtype NAME  int8, int4, float16 or bfloat16
          --table NAME  a table to convert; default: all. The others stay as they are
          --at VERSION  a version that the store keeps; default: the last
        examples:
          tierstore quantize shop shop-int8 --dtype int8
          tierstore quantize shop shop-mixed --dtype int4 --table item --table user
    """,
    "serve": """
        usage: tierstore serve [-h] [--store DIR] [--model FILE.pt2] [--ddr SIZE] [--dtype NAME] [--policy NAME]
                               [--threads N] [--host TEXT] [--port N]
                                 [--grpc-port N] [--admin-host TEXT]
                                 [--admin-port N]
                               [--workers N] [--max-batch-samples N] [--max-queue-samples N] [--max-queue-requests N]
                               [--request-seconds SECONDS] [--body-bytes N] [--grpc-body-bytes N] [--connections N]
                               [--receive-seconds SECONDS] [--idle-seconds
                                 SECONDS] [--out-of-range TEXT] [--warm-up
                                 TEXT]
                               [--record FILE.npz] [--record-rate X] [--follow-seconds SECONDS] [--updates]
                               [--grace-seconds SECONDS] [--token-file TEXT] [--admin-token-file TEXT]
                               [--tls-certificate TEXT] [--tls-key TEXT] [--log-level TEXT] [--log-text] [--traceback]
                               [FILE.toml]
        Serve the store's tables as lookups and, if tierstore train wrote it, its model, by the Open
          Inference Protocol over REST and gRPC. It follows the trainer's commits. SIGTERM ends it
          once requests are answered.
        positional arguments:
          FILE.toml             settings; keys as the flags, with _ for -
        options:
          --store DIR           folder of the store; with --updates it need not exist yet
          --model FILE.pt2      file of torch.export.save, served under the file's name; inputs named like features get
                                their rows
          --ddr SIZE            memory for rows: bytes, "2GiB", "50%" of the machine's or "5% of tables" (default: 50%)
          --dtype NAME          what rows are kept in memory as: "stored", or fewer bits: "float16", "bfloat16", "int8",
                                "int4" (default: stored)
          --policy NAME         which rows leave memory first: auto, lru, lfu or tinylfu (default: auto)
          --threads N           threads of a lookup and of the model; 0: the CPUs there are but one, shared by workers
          --host TEXT           address that REST and gRPC listen on; 0.0.0.0 for all (default: 127.0.0.1)
          --port N              port of REST; 0: any that is free (default: 8000)
          --grpc-port N         port of gRPC; 0: any that is free, -1: no gRPC (default: 8001)
          --admin-host TEXT     address of status page, metrics and admin calls; others need
            --admin-token-file (default:
                                127.0.0.1)
          --admin-port N        their port; 0: any that is free, -1: none. With workers, worker i
            takes port + i (default:
                                8002)
          --workers N           processes that share the ports; each takes its part of --ddr (default: 1)
          --max-batch-samples N
                                samples of a batch, and of a request (default: 4096)
          --max-queue-samples N
                                samples that may wait for a model; more are refused (503) (default: 65536)
          --max-queue-requests N
                                requests that may wait for a model; more are refused (503) (default: 4096)
          --request-seconds SECONDS
                                a request that gives no deadline has this one (default: 10.0)
          --body-bytes N        longest request over REST (default: 67108864)
          --grpc-body-bytes N   longest request over gRPC; 512 MiB over this many may be arriving at a time (default:
                                4194304)
          --connections N       connections at a time, of REST and of gRPC each (default: 1000)
          --receive-seconds SECONDS
                                time for a request to arrive whole (default: 30.0)
          --idle-seconds SECONDS
                                time a REST connection may stay open without a
                                  request; longer than your proxy's (default:
                                75.0)
          --out-of-range TEXT   "reject": ids that are no rows are an error; "zero": they count as
            rows of zeros, and are
                                counted (default: reject)
          --warm-up TEXT        rows to have in memory before the server is ready: "auto": those of
            its last run, "none",
                                or a trace of tierstore trace (default: auto)
          --record FILE.npz     file to record in which rows are looked up, for tierstore plan; workers add their number
          --record-rate X       share of the rows that is recorded; less once the recording has 64 MiB (default: 0.01)
          --follow-seconds SECONDS
                                how often to look for a newer commit; 0: never (default: 0.05)
          --updates             take updates of tierstore publish on the admin port; the store is
            then a replica; with an
                                admin token
          --grace-seconds SECONDS
                                on SIGTERM, time for requests under way to finish (default: 30.0)
          --token-file TEXT     file with the bearer token that clients must show; health stays open
          --admin-token-file TEXT
                                file with another, for the admin port; without it that port answers this machine and
                                changes nothing
          --tls-certificate TEXT
                                certificate chain in PEM, for TLS on all ports
          --tls-key TEXT        its key
          --log-level TEXT      what to log: debug, info, warning, error (default: info)
          --log-text            log plain lines instead of JSON
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
          --to URL           admin port of a server, as http://HOST:8002; repeatable
          --since VERSION    send what changed since it (default: since what each server has)
          --token-file PATH  file with the servers' admin token
          --dry-run          say what would be sent, and send nothing
          --keep-file PATH   keep the file that is sent under this name
        examples:
          tierstore publish shop --to http://replica-1:8002 --to http://replica-2:8002
          tierstore publish shop --since 12 --dry-run
    """,
    "warm-up": """
        usage: tierstore warm-up [-h] [--traceback]
        Compile everything that training and serving use on this machine's CPU, on all processors, so that later
        processes need not. The machine code is kept in this user's cache folder or in NUMBA_CACHE_DIR. Processes use it
        that can write there too, on the same model of CPU.
        options:
        example, in a Dockerfile:
          RUN pip install PATH_OF_THE_CHECKOUT && tierstore warm-up
    """,
}


def parsers():
    parser = cli.build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {"": parser, **commands.choices}


@pytest.mark.parametrize("name", HELP)
def test_help_is_frozen(name):
    # Python's versions break lines differently.
    found = " ".join(parsers()[name].format_help().split()) + " "
    for line in EVERYWHERE if name else EVERYWHERE[:1]:
        assert found.count(line) == 1
        found = found.replace(line, "")
    assert found.split() == HELP[name].split()


def test_every_command_is_frozen_here():
    # tests/plan/test_command.py has those of plan.
    assert list(parsers()) == [*HELP, "plan"]


def test_no_command_prints_the_help(capsys):
    assert cli.main([]) == 2
    assert "usage: tierstore" in capsys.readouterr().out
