"""A capacity plan for a workload of one's own: which hosts, how much memory, what limits them, and what if."""

from dataclasses import replace

from tierstore.plan import TableShape, Workload
from tierstore.plan.demand import Demand
from tierstore.plan.host import load_host
from tierstore.plan.loads import in_words
from tierstore.plan.model import predict
from tierstore.plan.search import SearchSpace, Target, search

GIB = 2**30

feed = Workload(
    name="feed",
    tables=(
        TableShape(name="user", num_embeddings=1_000_000_000, embedding_dim=64),
        TableShape(name="item", num_embeddings=100_000_000, embedding_dim=64, pooling_factor=30, exponent=0.9),
        TableShape(name="city", num_embeddings=50_000, embedding_dim=64),
    ),
    batch_samples=4096,
    optimizer="rowwise_adagrad",
    dense_flops=2e6,  # of the model beside its tables, forward, a sample
)
demand = Demand.analytic(feed, "tinylfu")  # ids by Zipf's law; Demand.from_accesses takes a recorded trace
unique = sum(pool.unique for pool in demand.pools)
print(f"{feed.name}: {feed.table_bytes / GIB:.0f} GiB of rows, {unique:,.0f} distinct rows a batch")

# The cheapest hosts that train at a rate. "server-2s" is an example; tierstore plan measure describes your machine.
space = SearchSpace(hosts=(1, 2, 4), dtypes=("float32",))
best = search(feed, demand, [load_host("server-2s")], Target(samples_per_s=250_000), space=space).best
print(f"{best.setup.hosts} x {best.setup.host.name}", end=", ")
print(f"{best.setup.host.ddr.capacity_bytes / GIB:.0f} GiB of memory each, SSDs each: {len(best.setup.host.storage)}")
print(f"{best.samples_per_s:,.0f} samples/s, a step of {1e3 * best.step_s:.0f} ms", end=", ")
print(f"limited by: {in_words(best.bottleneck)}")
for tier in best.tiers:
    found = "" if tier.tier == "ssd" else f", of which it has {tier.hit_rate:.1%}"
    print(f"  {tier.tier}: {tier.rows:,.0f} rows, asked for {tier.lookups:,.0f} a step{found}")

# What would other budgets for rows give on the same hosts?
for gib in (8, 16, 32, 64):
    other = predict(replace(best.setup, ddr_bytes=gib * GIB), demand)
    print(f"{gib:3} GiB for rows: {other.samples_per_s:9,.0f} samples/s, limited by: {in_words(other.bottleneck)}")
