"""The registry beside an MLflow server: the same requests, by the same client, over HTTP, in one run.

All servers keep their data in SQLite and hold 10,000 versions (copies of one that was registered). MLflow runs
twice, as it comes (four workers) and with one worker, and we are compared with the faster of the two,
operation by operation; our server runs as it comes (one worker). Requests come from one client, and from
four processes at once; "client" is the share of one core that they themselves needed for ours. The limit is a
request to our server that does nothing but read one row of its database. The second part asks servers of
our own with 1,000 to 100,000 versions for answers of the same size.

    python benchmarks/registry.py [--quick] [--mlflow-venv FOLDER] [--without-mlflow] [--part compare|flat]

MLflow is installed into a virtual environment of its own, in a temporary folder unless --mlflow-venv
names one to keep.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workloads.registry_servers import (
    ALIASED,
    API,
    TAGGED_ALIKE,
    Client,
    Server,
    install_mlflow,
    mlflow_servers,
    our_server,
    tag_of,
)

READS_AIM, CREATES_AIM, FLAT_AIM = 10.0, 5.0, 1.5
READS = (
    *("get version", "get by alias", "search one model", "search by tag", "get model"),
    *("search models", "latest versions", "download uri", "get model with many aliases"),
    "list webhooks",
)
CREATES = ("create model", "create version", "create and delete webhook")
WRITES = (
    *("set alias", "delete alias", "set model tag", "delete model tag", "set version tag"),
    *("delete version tag", "update model", "update version", "transition stage"),
    *("rename model and back", "create and delete model", "create and delete version"),
)
MANY_ALIASES = 300
LIMIT = "limit (/healthz)"
CLIENTS = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """How fast requests were answered, and which share of the time the client itself was busy."""

    per_second: float
    client_share: float


def get(path: str, **parameters: str) -> str:
    return f"{API}/{path}?" + "&".join(f"{k}={quote(v)}" for k, v in parameters.items())


def operations(
    client: Client, server: Server, unique: str, page: int
) -> dict[str, Callable[[int], Any]]:
    """The measured requests, by what they do; each takes a number that makes it different."""
    models, each = server.models, server.versions_each

    def version(number: int) -> Any:
        place = {"name": f"m{number % models}", "version": str(number * 7 % each + 1)}
        return client.call("GET", get("model-versions/get", **place))

    def alias(number: int) -> Any:
        place = {"name": f"m{number % ALIASED}", "alias": "a"}
        return client.call("GET", get("registered-models/alias", **place))

    def set_alias(number: int) -> Any:
        body = {"name": f"m{number % ALIASED}", "alias": "a", "version": str(number % each + 1)}
        return client.call("POST", f"{API}/registered-models/alias", body)

    def search(number: int) -> Any:
        query = {"filter": f"name = 'm{number % models}'", "max_results": str(page)}
        return client.call("GET", get("model-versions/search", **query))

    def by_tag(number: int) -> Any:
        value = tag_of(number % models, number * TAGGED_ALIKE % each)
        query = {"filter": f"tags.n = '{value}'", "max_results": "100"}
        return client.call("GET", get("model-versions/search", **query))

    def create_model(number: int) -> Any:
        name = {"name": f"new-{unique}-{number}"}
        return client.call("POST", f"{API}/registered-models/create", name)

    def create_version(number: int) -> Any:
        tags = [{"key": "k", "value": "v"}]
        body = {"name": f"m{number % models}", "source": "s3://b/x", "tags": tags}
        return client.call("POST", f"{API}/model-versions/create", body)

    more = _more_operations(client, server, unique)
    return more | {
        "set alias": set_alias,
        "get version": version,
        "get by alias": alias,
        "search one model": search,
        "search by tag": by_tag,
        "create model": create_model,
        "create version": create_version,
        LIMIT: lambda _: client.call("GET", server.health),
    }


def _more_operations(
    client: Client, server: Server, unique: str
) -> dict[str, Callable[[int], Any]]:
    """The operations of MLflow's registry that the other function does not have."""
    models, each = server.models, server.versions_each

    def name(number: int) -> str:
        return f"m{number % models}"

    def place(number: int) -> dict[str, str]:
        return {"name": name(number), "version": str(number * 7 % each + 1)}

    def post(path: str, method: str = "POST", **body: Any) -> Any:
        return client.call(method, f"{API}/{path}", body)

    def created_and_deleted(number: int) -> Any:
        named = f"gone-{unique}-{number}"
        post("registered-models/create", name=named)
        return post("registered-models/delete", "DELETE", name=named)

    def version_created_and_deleted(number: int) -> Any:
        made = post("model-versions/create", name=name(number), source="s3://b/x")
        found = made["model_version"]["version"]
        return post("model-versions/delete", "DELETE", name=name(number), version=found)

    def renamed_and_back(number: int) -> Any:
        other = f"other-{unique}-{number}"
        post("registered-models/rename", name=name(number), new_name=other)
        return post("registered-models/rename", name=other, new_name=name(number))

    def webhook(number: int) -> Any:
        events = [{"entity": "MODEL_VERSION", "action": "CREATED"}]
        url = "https://hooks.example.com/"
        made = post("webhooks", name=f"hook-{unique}-{number}", url=url, events=events)
        return post(f"webhooks/{made['webhook']['webhook_id']}", "DELETE")

    def many_aliases(number: int) -> Any:
        if number == 0:
            post("registered-models/create", name=f"aliases-{unique}")
            post("model-versions/create", name=f"aliases-{unique}", source="s3://b/x")
            for n in range(MANY_ALIASES):
                named = {"name": f"aliases-{unique}", "alias": f"a-{n}", "version": "1"}
                post("registered-models/alias", **named)
        return client.call("GET", get("registered-models/get", name=f"aliases-{unique}"))

    def stage(number: int) -> Any:
        goal = ("Archived", "None")[number // models % 2]
        return post("model-versions/transition-stage", stage=goal, **place(number % models))

    return {
        "get model": lambda n: client.call("GET", get("registered-models/get", name=name(n))),
        "search models": lambda _: client.call(
            "GET", get("registered-models/search", max_results="100")
        ),
        "latest versions": lambda n: post("registered-models/get-latest-versions", name=name(n)),
        "download uri": lambda n: client.call(
            "GET", get("model-versions/get-download-uri", **place(n))
        ),
        "get model with many aliases": many_aliases,
        "list webhooks": lambda _: client.call("GET", f"{API}/webhooks"),
        "create and delete webhook": webhook,
        "delete alias": lambda n: post(
            "registered-models/alias", "DELETE", name=name(n), alias=f"none-{n}"
        ),
        "set model tag": lambda n: post(
            "registered-models/set-tag", name=name(n), key="k", value=str(n)
        ),
        "delete model tag": lambda n: post(
            "registered-models/delete-tag", "DELETE", name=name(n), key="none"
        ),
        "set version tag": lambda n: post(
            "model-versions/set-tag", key="k", value=str(n), **place(n)
        ),
        "delete version tag": lambda n: post(
            "model-versions/delete-tag", "DELETE", key="none", **place(n)
        ),
        "update model": lambda n: post(
            "registered-models/update", "PATCH", name=name(n), description=str(n)
        ),
        "update version": lambda n: post(
            "model-versions/update", "PATCH", description=str(n), **place(n)
        ),
        "transition stage": stage,
        "rename model and back": renamed_and_back,
        "create and delete model": created_and_deleted,
        "create and delete version": version_created_and_deleted,
    }


_unique = itertools.count()


def rate(server: Server, operation: str, seconds: float, page: int, unique: str = "") -> Measured:
    """How often one client gets an answer, over `seconds` on one connection."""
    client = server.client()
    client.call("GET", server.health)
    run = operations(client, server, unique or f"one-{next(_unique)}", page)[operation]
    run(0)
    count, began, busy = 0, time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - began) < seconds:
        count += 1
        run(count)
    client.close()
    return Measured(count / passed, (time.process_time() - busy) / passed)


def rate_of_many(server: Server, operation: str, seconds: float, page: int) -> Measured:
    """The sum over several client processes that ask at the same time."""
    context, turn = multiprocessing.get_context("fork"), next(_unique)
    with context.Pool(CLIENTS) as pool:
        jobs = [(server, operation, seconds, page, f"many-{turn}-{c}") for c in range(CLIENTS)]
        found = pool.starmap(rate, jobs, chunksize=1)
    return Measured(sum(one.per_second for one in found), sum(one.client_share for one in found))


Rates = dict[tuple[str, str], list[Measured]]


def compare(folder: Path, venv: Path | None, rounds: int) -> None:
    models, versions = 100, 10_000
    with contextlib.ExitStack() as stack:
        peers: dict[str, Server] = {}
        if venv is not None:
            started = mlflow_servers(folder, venv, (None, 1), models, versions)
            default, single = stack.enter_context(started)
            peers |= {"mlflow, 4 workers": default, "mlflow, 1 worker": single}
        ours = stack.enter_context(our_server(folder / "ours", models, versions))
        peers = {"ours": ours} | peers
        for label, measure in (("one client", rate), (f"{CLIENTS} clients", rate_of_many)):
            rates: Rates = {}
            for _ in range(rounds):
                for operation in (*WRITES, *READS, *CREATES, LIMIT):
                    for name, server in peers.items():
                        if operation == LIMIT and name != "ours":
                            continue
                        found = measure(server, operation, 0.5, versions // models)
                        rates.setdefault((operation, name), []).append(found)
            report(rates, list(peers), f"{label}, {versions:,} versions")


def report(rates: Rates, peers: list[str], title: str) -> None:
    middle = {key: statistics.median(one.per_second for one in all_) for key, all_ in rates.items()}
    share = {
        key: statistics.median(one.client_share for one in all_) for key, all_ in rates.items()
    }
    limit = middle[(LIMIT, "ours")]
    print(f"\noperations per second over HTTP, {title} (median of rounds)")
    print(f"{'':18}" + "".join(f"{name:>18}" for name in peers) + "   ratio  of limit  client  aim")
    for operation in (*WRITES, *READS, *CREATES):
        ours = middle[(operation, "ours")]
        shown = "".join(f"{middle[(operation, name)]:18.0f}" for name in peers)
        best = max((middle[(operation, name)] for name in peers[1:]), default=None)
        ratio = "" if best is None else f"{ours / best:.1f}x"
        client = f"{share[(operation, 'ours')]:.0%}"
        verdict = _verdict(operation, ours, best)
        print(f"{operation:18}{shown}{ratio:>8}{ours / limit:10.2f}{client:>8}  {verdict}")
    print(f"{LIMIT:18}{limit:18.0f}")


def _verdict(operation: str, ours: float, best: float | None) -> str:
    aim = READS_AIM if operation in READS else CREATES_AIM if operation in CREATES else None
    if aim is None or best is None:
        return ""
    return f">= {aim:g}x: {'met' if ours / best >= aim else 'missed'}"


def flatness(folder: Path, sizes: list[int], rounds: int) -> None:
    """Milliseconds per request at several sizes, the servers side by side."""
    models, page = 20, 50
    times: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        servers = {
            size: stack.enter_context(our_server(folder / f"flat-{size}", models, size))
            for size in sizes
        }
        for _ in range(rounds):
            for operation in (*WRITES, *READS, *CREATES):
                for size, server in servers.items():
                    found = 1000 / rate(server, operation, 0.25, page).per_second
                    times.setdefault((operation, size), []).append(found)
    print("\nmilliseconds per request by number of versions (minimum of rounds)")
    print(f"{'':18}" + "".join(f"{size:>10,}" for size in sizes) + "    last/first  aim")
    for operation in (*WRITES, *READS, *CREATES):
        best = [min(times[(operation, size)]) for size in sizes]
        ratio = best[-1] / best[0]
        verdict = f"<= {FLAT_AIM:g}: {'met' if ratio <= FLAT_AIM else 'missed'}"
        figures = "".join(f"{value:10.2f}" for value in best)
        print(f"{operation:18}{figures}    {ratio:10.2f}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument("--mlflow-venv", type=Path, help="where MLflow is, or is to be installed")
    parser.add_argument("--without-mlflow", action="store_true", help="measure ours alone")
    parser.add_argument("--part", choices=["compare", "flat"], help="only this part")
    chosen = parser.parse_args()
    rounds = 3 if chosen.quick else 7
    with tempfile.TemporaryDirectory(prefix="tensorforge-registry-") as place:
        folder = Path(place)
        if chosen.part != "flat":
            venv = None if chosen.without_mlflow else chosen.mlflow_venv or folder / "venv"
            if venv is not None:
                install_mlflow(venv)
            compare(folder, venv, rounds)
        if chosen.part != "compare":
            flatness(folder, [1_000, 10_000] if chosen.quick else [1_000, 10_000, 100_000], rounds)


if __name__ == "__main__":
    main()
