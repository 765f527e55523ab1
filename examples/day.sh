#!/bin/sh
# A first day with tierstore, in an empty folder and a fresh environment, with the seconds of each part:
#
#     sh examples/day.sh           # DAY_TORCH: what pip installs as torch, as "torch --index-url URL"
#
# DAY_BIN=DIR takes an environment that is there instead of installing one, DAY_ROWS the rows of data (200000).
set -eu
checkout=$(cd "$(dirname "$0")/.." && pwd)
rows=${DAY_ROWS:-200000}
folder=$(mktemp -d)
export TMPDIR="$folder"
cd "$folder"
begun=$(date +%s)
started=
trap 'kill $started 2> /dev/null || true; wait; rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM

part() { # NAME COMMAND...: runs it, its output in a file that is shown if it fails
  part=$1 start=$(date +%s)
  shift
  "$@" > "$part.log" 2>&1 || { tail -n 20 "$part.log"; echo "$part failed"; exit 1; }
  echo "$part: $(($(date +%s) - start)) s"
}

until_said() { # FILE WORDS: waits up to two minutes for them; the line that has them
  for _ in $(seq 1200); do
    grep -m 1 -- "$2" "$1" && return
    sleep 0.1
  done
  tail -n 20 "$1" && return 1
}

install() {
  python3 -m venv env
  env/bin/python -m pip install ${DAY_TORCH:-torch}
  env/bin/python -m pip install "$checkout[parquet,serve]"
}

own_model() { # tables in the place of a model's own embeddings
  python - << 'END'
import tierstore, torch

model = torch.nn.Sequential(torch.nn.EmbeddingBag(5000, 16), torch.nn.Linear(16, 1))
with tierstore.open("own", ddr="64MiB", keep=2) as store:
    model = tierstore.convert(model, store)
    optimizer = torch.optim.Adam(model[1].parameters())
    for step in range(20):
        loss = model(torch.randint(5000, (64, 8))).square().mean()
        loss.backward()
        optimizer.step()
    print("version", tierstore.checkpoint.save(store, model, [optimizer]), "loss", loss.item())
END
  tierstore inspect own
}

own_data() {
  python - "$rows" << 'END'
import sys
import numpy as np, pyarrow as pa, pyarrow.parquet

rows = int(sys.argv[1])
made = np.random.default_rng(0)
columns = {name: made.zipf(1.3, rows) % 10_000 for name in ("user", "item")}
columns |= {"clicked": (columns["item"] % 3 == 0).astype(np.int64), "price": made.random(rows)}
pa.parquet.write_table(pa.table(columns), "clicks.parquet")
END
  cat > run.toml << 'END'
store = { path = "run", ddr = "64MiB", keep = 2 }
data = { path = "clicks.parquet", label_column = "clicked", dense_columns = ["price"], sparse_columns = ["user", "item"] }
embedding = { dim = 16, num_embeddings = 10000 }
END
  tierstore train run.toml
}

server() { # NAME FLAGS...: one at any free ports; its URL is in NAME.url
  own=$1
  shift
  tierstore serve --ddr 64MiB --port 0 --grpc-port -1 --admin-port -1 "$@" > "$own.out" 2> "$own.err" &
  started="$started $!"
  until_said "$own.out" "ready: " | sed 's/.*REST \([^ ,]*\).*/\1/' > "$own.url"
}

version_of() { # NAME: the version that answers a request for rows
  curl --no-progress-meter --max-time 10 --fail "$(cat "$1.url")/v2/models/rows.item/infer" --data \
    '{"inputs": [{"name": "ids", "datatype": "INT64", "shape": [2], "data": [3, 17]}]}' |
    sed 's/.*"model_version": *"\([0-9]*\)".*/\1/'
}

ask() { test "$(version_of trainer)" -ge 1; }

publish() { # a version that is trained while two replicas serve reaches both
  tierstore publish run --port 0 > publish.out 2>&1 &
  started="$started $!"
  source=$(until_said publish.out "ready: " | sed 's/ready: //')
  server replica-1 --store replica-1 --from "$source"
  server replica-2 --store replica-2 --from "$source"
  tierstore train run.toml --resume --epochs 2
  last=$(tierstore inspect run | sed -n '1s/.*: version \([0-9]*\).*/\1/p')
  for replica in replica-1 replica-2; do
    for _ in $(seq 600); do
      if test "$(version_of "$replica" || true)" = "$last"; then continue 2; fi
      sleep 0.1
    done
    echo "$replica has not reached version $last" && return 1
  done
}

ranks() { # two ranks, then one goes on
  torchrun --nproc-per-node 2 -m tierstore train run.toml --store ranks
  torchrun --nproc-per-node 1 -m tierstore train run.toml --store ranks --resume --epochs 2
}

if test -z "${DAY_BIN:-}"; then
  part install install
  DAY_BIN=$folder/env/bin
fi
PATH=$DAY_BIN:$PATH
part demo tierstore demo --dir demo --rows "$((rows < 200000 ? 10 * rows : 0))"
part convert own_model
part parquet own_data
part serve server trainer --store run
part curl ask
part publish publish
part torchrun ranks
part plan tierstore plan "$checkout/examples/plan.toml"
echo "the whole day: $(($(date +%s) - begun)) s"
