"""Settings: layers, and errors that name file, key and the nearest known key."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from ratchet.errors import SettingsError
from ratchet.settings.load_settings import known_keys, load
from ratchet.settings.project_settings import Settings, local_url
from ratchet.settings.setting_errors import leaves, type_of_key
from ratchet.trainer.settings.judge_specs import FunctionSpec
from ratchet.trainer.tasks import TaskSet
from ratchet.tuner.tasks import ImportedTasks
from tests.harness.cli.project import Project, wait_for


def read(tmp_path: Path, text: str, **environ: str) -> Settings:
    file = tmp_path / "ratchet.yaml"
    file.write_text(text)
    return load(file, environ=environ)


def test_later_layers_win_and_defaults_fill(tmp_path: Path) -> None:
    file = tmp_path / "ratchet.yaml"
    file.write_text("project: mail\nproxy: {port: 9000, host: 127.0.0.2}\nvllm: {max_loras: 6}")
    options = {("proxy", "port"): ("--port", 9200), ("model",): ("--model", None)}
    settings = load(file, options, {"RATCHET_PROXY__PORT": "9100", "RATCHET_VLLM__MAX_LORAS": "8"})
    proxy = settings.proxy
    assert (proxy.port, proxy.host, settings.vllm.max_loras) == (9200, "127.0.0.2", 8)
    assert (settings.project, settings.model, proxy.capture) == ("mail", "policy", "strict")
    assert settings.is_set("proxy", "port")
    assert not settings.is_set("vllm", "port")


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("prject: a", {}, "ratchet.yaml: unknown key prject; the nearest known key is project"),
        ("proxy: {prt: 1}", {}, "unknown key proxy.prt; the nearest known key is proxy.port"),
        ("learner: {lerning_rate: 1}", {}, "the nearest known key is learner.learning_rate"),
        ("trainer: {lora_rr: 4}", {}, "unknown key trainer.lora_rr; the nearest known key is learner.lora_r"),
        (
            "proxy: {agent_limits: {policy: {requests_per_min: 3}}}",
            {},
            "ratchet.yaml: unknown key proxy.agent_limits.policy.requests_per_min; the nearest known key is "
            "proxy.agent_limits.policy.requests_per_minute",
        ),
        (
            "model_list: [{model_nam: x, litellm_params: {model: y}}]",
            {},
            "unknown key model_list.0.model_nam; the nearest known key is model_list.0.model_name",
        ),
        (
            "agents: {mail: {judge: {kind: composite, parts: [{judge: 'a:b', name: x, wieght: 1}]}}}",
            {},
            "unknown key agents.mail.judge.composite.parts.0.wieght; the nearest known key is "
            "agents.mail.judge.composite.parts.0.weight",
        ),
        (
            "trainer: {judge: {kind: function, function: 'a:b', functon: x}}",
            {},
            "unknown key trainer.judge.function.functon; the nearest known key is trainer.judge.function.function",
        ),
        ("proxy: {agent_limits: {policy: {x: 3}}}", {}, "policy.x; known are requests_per_minute, tokens_per_minute"),
        ("proxy: {agent_limits: 3}", {}, "proxy.agent_limits: must hold keys and values, such as `{KEY: VALUE}`"),
        ("proxy: {trusted_proxies: 10.0.0.1}", {}, "ratchet.yaml: proxy.trusted_proxies: must be a list: write it in"),
        ("proxy: {otlp_endpoint: nope}", {}, "proxy.otlp_endpoint: 'nope' is not an http(s) URL; write it like http"),
        ("", {"RATCHET_FOO": "2"}, "variable RATCHET_FOO: unknown key foo; docs/configuration.md lists the keys"),
        ("proxy: {store: a.db}", {}, "unknown key proxy.store; the nearest known key is store"),
        ("proxy: 8000", {}, "proxy is a section"),
        ("vllm: {port: {a: 1}}", {}, "vllm.port: input should be a valid integer"),
        (
            "proxy: {drain_timeout_seconds: .inf}",
            {},
            "ratchet.yaml: proxy.drain_timeout_seconds: must be a finite number; for the default, leave the key out",
        ),
        ("", {"RATCHET_PROXY__KEEP_ALIVE_SECONDS": "inf"}, "proxy.keep_alive_seconds: must be a finite number"),
        (
            "trainer: {judge: {kind: ruler, model: m, base_url: 'http://j', timeout_seconds: .inf}}",
            {},
            "timeout_seconds: must be a finite number",
        ),
        ("proxy: {drain_delay_seconds: 4000}", {}, "drain_delay_seconds: input should be less than or equal to 3600"),
        ("vllm: {port: many}", {}, "ratchet.yaml: vllm.port: input should be a valid integer"),
        ("learner: {lora_r: 0}", {}, "ratchet.yaml: learner.lora_r is 0; it must be an integer from 1 to 512"),
        ("learner: {num_processes: 0}", {}, "ratchet.yaml: learner.num_processes is 0"),
        ("learner: {token_budget: many}", {}, "ratchet.yaml: learner.token_budget: input should be a valid integer"),
        ("learner: {devices: first}", {}, "ratchet.yaml: learner.devices: 'first' is not a device"),
        (
            "trainer: {learner: {lora_r: 4}}",
            {},
            "ratchet.yaml: unknown key trainer.learner; the nearest known key is learner",
        ),
        (
            "trainer: {num_processes: 4}",
            {},
            "ratchet.yaml: unknown key trainer.num_processes; the nearest known key is learner.num_processes",
        ),
        ("", {"RATCHET_TRAINER__DEVICES": "0"}, "the nearest variable is RATCHET_LEARNER__DEVICES"),
        ("vllm: {host: 0.0.0.0}", {}, "vllm.host: 0.0.0.0 can be reached from other machines"),
        ("vllm: {host: '::'}", {}, "use 127.0.0.1 or ::1, and proxy.host"),
        ("vllm: {extra_args: [--host=0.0.0.0]}", {}, "--host is set by Ratchet; use vllm.host"),
        ("a: [", {}, "is not YAML"),
        ("- a", {}, "must hold keys and values"),
        ("", {"RATCHET_PROXY__PRT": "1"}, "variable RATCHET_PROXY__PRT: unknown key proxy.prt"),
        ("", {"RATCHET_PROYX__PORT": "1"}, "unknown key proyx; the nearest known key is proxy.port"),
        ("", {"RATCHET_API_KEY": "x"}, "variable RATCHET_API_KEY is not known; did you mean RATCHET_API_KEYS?"),
        ("", {"RATCHET_PROXY": "1"}, "names a section"),
        ("", {"RATCHET_PROXY_PORT": "9000"}, "the nearest variable is RATCHET_PROXY__PORT, with two underscores"),
        ("", {"RATCHET_LEARNER_LORA_R": "9"}, "the nearest variable is RATCHET_LEARNER__LORA_R"),
        ("port: 9000", {}, "the nearest known keys are learner.port, proxy.port, vllm.port"),
        ("store: mysql://u:secret@db/x", {}, "mysql is not supported; use sqlite:///PATH or postgresql://"),
        ("store: /nosuch/dir/x.db", {}, "there is no folder /nosuch/dir; make it (mkdir -p /nosuch/dir)"),
        ("", {"RATCHET_VLLM__PORT": "x"}, "variable RATCHET_VLLM__PORT: vllm.port"),
    ],
)
def test_a_wrong_setting_names_its_place_and_the_nearest_key(
    tmp_path: Path, text: str, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as error:
        read(tmp_path, text, **environ)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_error_in_the_file_does_not_show_its_content(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not YAML") as error:
        read(tmp_path, "vllm: {env: {HF_TOKEN: hf_secret, X: [}}")
    assert "hf_secret" not in str(error.value)


def _takes_a_float(kind: Any) -> bool:
    return kind is float or any(map(_takes_a_float, get_args(kind)))


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_no_number_is_infinite(value: str) -> None:
    known = known_keys()
    keys = [path for path in leaves(known) if _takes_a_float(type_of_key(path, known, ""))]
    assert {("proxy", "drain_timeout_seconds"), ("learner", "max_grad_norm"), ("agents", "NAME", "share")} < {*keys}
    for path in keys:
        content: Any = float(value)
        if path == ("tuner", "prices"):
            content = {"a-model": {"input": content}}
        for key in reversed(path):
            content = {key: content}
        with pytest.raises(SettingsError, match=re.escape(".".join(path))):
            load(environ={}, content=content)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml", environ={})


def test_what_kubernetes_says_of_a_service_of_our_name_is_no_setting(tmp_path: Path) -> None:
    links = {
        "RATCHET_PROXY_SERVICE_HOST": "10.0.0.7",
        "RATCHET_PROXY_SERVICE_PORT_HTTP": "8000",
        "RATCHET_PROXY_PORT": "tcp://10.0.0.7:8000",
        "RATCHET_PORT_8000_TCP_ADDR": "10.0.0.7",
        "RATCHET_PORT_8000_TCP": "tcp://10.0.0.7:8000",
    }
    assert read(tmp_path, "", **links).proxy.port == 8000
    with pytest.raises(SettingsError, match="unknown key proxy_port"):
        read(tmp_path, "", RATCHET_PROXY_PORT="9000")


def test_lists_and_mappings_can_be_given_by_variable(tmp_path: Path) -> None:
    environ = {"RATCHET_VLLM__EXTRA_ARGS": "[--seed, '3']", "RATCHET_VLLM__ENV": "{OMP_NUM_THREADS: '2'}"}
    vllm = read(tmp_path, "", **environ).vllm
    assert vllm.extra_args == ("--seed", "3")
    assert vllm.env == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    "text",
    ["日本.db", "a: b.db", "two\nlines.db", "a #b.db", "'quoted'.db", " 007", os.fsdecode("é".encode("latin-1"))],
)
def test_a_path_by_variable_is_taken_as_it_is(tmp_path: Path, text: str) -> None:
    tls = {"RATCHET_PROXY__TLS_CERTIFICATE": text, "RATCHET_PROXY__TLS_KEY": text}
    settings = read(tmp_path, "", RATCHET_STORE=text, RATCHET_STATE_DIR=text, **tls)
    assert (settings.store, settings.state_dir) == (text, Path(text))
    assert settings.proxy.tls_key == Path(text)


@pytest.mark.slow
def test_a_proxy_that_reads_ascii_opens_a_store_of_any_name(project: Project) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    name = "日本 a: b\nメール.db"
    project.start("proxy", "--upstream", "http://127.0.0.1:1", "--model", "agent", RATCHET_STORE=name, **ascii_only)
    url = f"http://127.0.0.1:{project.content['proxy']['port']}/health/ready"

    def uses_the_store() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return bool(httpx.get(url).json()["store_up"])
        return False

    wait_for("the proxy reads the store", uses_the_store)
    assert (project.folder / name).exists()


@pytest.mark.parametrize("text", ["", "null", "~"])
def test_an_empty_variable_or_null_is_no_text(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, "", RATCHET_STORE=text).store is None


def test_learner_settings_reach_the_trainer(tmp_path: Path) -> None:
    settings = read(tmp_path, "trainer: {judge: a.b:c}\nlearner: {lora_r: 4, learning_rate: 1e-3, devices: [0, 1]}")
    trainer = settings.trainer
    assert (trainer.learner_process.lora_r, trainer.learner.learning_rate) == (4, 1e-3)
    assert trainer.learner_process.devices == "0,1"
    assert trainer.judge == FunctionSpec(function="a.b:c")
    assert trainer.vllm == ("http://127.0.0.1:8001",)


def test_port_zero_means_any_free_port(tmp_path: Path) -> None:
    settings = read(tmp_path, "vllm: {port: 0}\nproxy: {port: 0}")
    assert (settings.vllm.port, settings.proxy.port) == (0, 0)


def test_an_ipv6_address_is_bracketed_wherever_it_stands_in_a_url(tmp_path: Path) -> None:
    settings = read(tmp_path, "vllm: {host: '::1'}")
    assert settings.proxy.upstreams == ("http://[::1]:8001",)
    assert settings.trainer.vllm == ("http://[::1]:8001",)
    assert local_url("::", 80) == "http://[::1]:80"
    assert local_url("0.0.0.0", 80) == "http://127.0.0.1:80"


def test_resampling_is_refused_if_vllm_does_not_report_its_load(tmp_path: Path) -> None:
    resamples, silent = "trainer: {resample: {samples: 2}}", "vllm: {extra_args: [--disable-log-stats]}"
    with pytest.raises(SettingsError, match=r"remove that from vllm\.extra_args"):
        read(tmp_path, f"{resamples}\n{silent}")
    read(tmp_path, resamples)
    read(tmp_path, silent)


def test_the_gates_task_set_may_be_an_imported_one(tmp_path: Path) -> None:
    file, rows = tmp_path / "ratchet.yaml", tmp_path / "test.jsonl"
    file.write_text("base_model: tiny\ntrainer: {judge: 'a:b', release: {workflow: 'a:b', tasks: mail}}")
    settings = load(file, {("state_dir",): ("", str(tmp_path))}, {})
    assert settings.trainer.release.tasks == "mail"  # of the hub, as long as none of that name is imported
    rows.write_text('{"question": "who?"}\n')
    ImportedTasks(settings.state.tasks).add(TaskSet.of_files("mail", {"test": rows}), "mail")
    named = load(file, {("state_dir",): ("", str(tmp_path))}, {}).trainer.release.tasks
    assert [task.row for task in TaskSet.open(named or "").rows("test")] == [{"question": "who?"}]
