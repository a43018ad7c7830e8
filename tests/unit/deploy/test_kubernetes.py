"""The manifests fit Kubernetes' schemas, each other, and the commands that they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tensorforge.security import TokenStore

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
VERSIONS = ["1.31", "1.34", kubernetes_validate.latest_version()]
MANIFESTS = [
    manifest
    for name in KUSTOMIZATION["resources"]
    for manifest in yaml.safe_load_all((FOLDER / name).read_text())
]


def named(kind, name):
    (found,) = [m for m in MANIFESTS if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(manifest):
    return manifest["spec"]["template"]


PODS = [pod_of(m) for m in MANIFESTS if m["kind"] in ("Job", "Deployment", "StatefulSet")]
WORKERS = named("Job", "workers")["spec"]
(WORKER,) = WORKERS["template"]["spec"]["containers"]
(COORDINATOR,) = pod_of(named("Deployment", "coordinator"))["spec"]["containers"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}"
)
def test_a_manifest_fits_the_published_schema(manifest, version):
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schema_check_can_fail():
    wrong = {**named("Job", "workers"), "spec": {**WORKERS, "paralellism": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_every_file_is_part_of_the_kustomization():
    files = {path.name for path in FOLDER.glob("*.yaml")}
    assert files == {"kustomization.yaml", *KUSTOMIZATION["resources"]}


@pytest.mark.parametrize(
    "pod", PODS, ids=lambda p: p["metadata"]["labels"]["app.kubernetes.io/name"]
)
def test_a_pod_has_no_rights_that_it_does_not_need(pod):
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_secrets_and_config_maps_are_generated_under_the_names_that_pods_use():
    made = {entry["name"] for entry in KUSTOMIZATION["secretGenerator"]}
    variables = [v for pod in PODS for c in pod["spec"]["containers"] for v in c.get("env", [])]
    used = {
        v["valueFrom"]["secretKeyRef"]["name"]
        for v in variables
        if "secretKeyRef" in v.get("valueFrom", {})
    }
    assert used == made
    (script,) = [
        v["configMap"]["name"] for v in WORKERS["template"]["spec"]["volumes"] if "configMap" in v
    ]
    assert [script] == [entry["name"] for entry in KUSTOMIZATION["configMapGenerator"]]


def test_services_select_pods_and_their_ports():
    for name in ("coordinator", "postgres"):
        service = named("Service", name)["spec"]
        (pod,) = [p for p in PODS if service["selector"].items() <= p["metadata"]["labels"].items()]
        ports = {port["containerPort"] for c in pod["spec"]["containers"] for port in c["ports"]}
        assert {port["port"] for port in service["ports"]} == ports


def test_every_network_policy_selects_a_pod():
    for policy in (m["spec"] for m in MANIFESTS if m["kind"] == "NetworkPolicy"):
        chosen = policy["podSelector"].get("matchLabels", {})
        assert any(chosen.items() <= pod["metadata"]["labels"].items() for pod in PODS)


def test_a_worker_that_left_is_replaced_and_spends_no_retry():
    rules = WORKERS["podFailurePolicy"]["rules"]
    ignored = [
        r["onExitCodes"]["values"] for r in rules if r["action"] == "Ignore" and "onExitCodes" in r
    ]
    assert ignored == [[75]]
    assert WORKERS["parallelism"] == WORKERS["completions"]
    assert WORKERS["template"]["spec"]["restartPolicy"] == "Never"


def run_tensorforge(*words, **variables):
    return subprocess.run(
        [sys.executable, "-m", "tensorforge", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_workers_options_exist():
    (options, script) = WORKER["args"][1:-1], WORKER["args"][-1]
    done = run_tensorforge(WORKER["args"][0], *options, script)
    assert f"the script {script} does not exist" in done.stderr


def test_the_prestop_hook_asks_the_coordinator_to_let_the_worker_go():
    shell, flag, text = WORKER["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    assert text == 'tensorforge leave "$POD_NAME"'
    names = {variable["name"] for variable in WORKER["env"]}
    assert {"POD_NAME", "TENSORFORGE_COORDINATOR", "TENSORFORGE_TOKEN"} <= names


def test_the_coordinators_command_serves_with_the_token(tmp_path):
    (text,) = COORDINATOR["args"]
    assert COORDINATOR["command"][-2:] == ["/bin/sh", "-c"]
    token = TokenStore().issue("job", ["observe"])
    port = "0"
    process = subprocess.Popen(
        ["/bin/sh", "-c", text.replace("29400", port).replace("9400", port)],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "POD_IP": "127.0.0.1",
            "JOURNAL": str(tmp_path / "journal.db"),
            "TOKEN": token,
            "TMPDIR": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = process.stdout.readline().rsplit(" ", 1)[-1].strip()
        denied = run_tensorforge("status", "--coordinator", address)
        status = run_tensorforge("status", "--coordinator", address, TENSORFORGE_TOKEN=token)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
    assert denied.returncode != 0
    assert status.returncode == 0, status.stderr
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0
