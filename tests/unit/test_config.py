"""Settings: what may be said, who overrules whom, and whether a mistake is told well enough to fix it."""

from __future__ import annotations

import pytest

from millstream.config import (
    FLAGS,
    Settings,
    allowed_values,
    environment_name,
    load_settings,
    overlooked_variables,
    parse_bytes,
    parse_duration_ms,
    setting_fields,
)
from millstream.errors import ConfigInvalid

KEYS = [key for key, _ in setting_fields()]


def problem_of(yaml_text: str | None = None, env: dict[str, str] | None = None, **flags: object) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        load_settings(yaml_text, env or {}, {key.replace("__", "."): v for key, v in flags.items()}, file_name="m.yaml")
    return str(caught.value)


def test_nothing_given_means_defaults() -> None:
    settings, sources = load_settings(None, {}, {})
    assert settings == Settings()
    assert set(sources) == set(KEYS)
    assert set(sources.values()) == {"default"}


def test_default_settings_pass_their_own_checks() -> None:
    """Defaults are not validated by the model; giving each of them explicitly is."""
    for key, field in setting_fields():
        load_settings(None, {environment_name(key): str(field.default)}, {})


def test_flags_overrule_overrides_overrule_environment_overrules_file() -> None:
    yaml_text = "server:\n  port: 1\n  host: file\n  backlog: 3\n  max_connections: 4\n"
    env = {
        "MILLSTREAM_SERVER__PORT": "11",
        "MILLSTREAM_SERVER__HOST": "environment",
        "MILLSTREAM_SERVER__BACKLOG": "13",
    }
    settings, sources = load_settings(
        yaml_text,
        env,
        {"server.port": "31", "server.host": None},
        overrides={"server.port": "21", "server.host": "override"},
        file_name="m.yaml",
    )
    server = settings.server
    assert (server.port, server.host, server.backlog, server.max_connections) == (31, "override", 13, 4)
    assert sources["server.port"] == "--port"
    assert sources["server.host"] == "--set"
    assert sources["server.backlog"] == "MILLSTREAM_SERVER__BACKLOG"
    assert sources["server.max_connections"] == "m.yaml line 5"


@pytest.mark.parametrize("text", [None, "", "# nothing but a comment\n", "server:\n  # port: 1\nlog:\n"])
def test_empty_files_and_sections_are_fine(text: str | None) -> None:
    assert load_settings(text, {}, {})[0] == Settings()


def test_which_mqtt_topics_are_stored_is_a_list_of_rules() -> None:
    settings, _ = load_settings("mqtt:\n  storage: debug/#=never, +/a=b/c=always,\n", {}, {})
    assert settings.mqtt.storage_rules == (("debug/#", "never"), ("+/a=b/c", "always"))
    assert Settings().mqtt.storage_rules == ()
    for wrong in ("orders", "orders=sometimes", "=always", "a/#/b=always", "a#=never", "a=always b+=never"):
        assert "use filters and what holds for them" in problem_of(None, {"MILLSTREAM_MQTT__STORAGE": wrong})


def test_variables_of_kubernetes_are_not_ours() -> None:
    """A service called millstream gives every pod MILLSTREAM_PORT=tcp://...; that must not stop a broker."""
    env = {"MILLSTREAM_PORT": "tcp://10.0.0.1:9092", "MILLSTREAM_SERVER_PORT": "tcp://10.0.0.1:9092", "PATH": "/bin"}
    assert load_settings(None, env, {})[0] == Settings()
    assert overlooked_variables(env) == []


def test_a_variable_with_too_few_underscores_is_pointed_out() -> None:
    env = {"MILLSTREAM_SERVER_PORT": "9192", "MILLSTREAM_DATA": "/tmp/x", "MILLSTREAM_TOPICS_AUTO_CREATE": "false"}
    assert overlooked_variables({**env, "MILLSTREAM_BROKER": "b:9092", "MILLSTREAM_HTTP__PORT": "0"}) == [
        "the variable MILLSTREAM_DATA sets nothing; did you mean MILLSTREAM_STORAGE__DATA?",
        "the variable MILLSTREAM_SERVER_PORT sets nothing; did you mean MILLSTREAM_SERVER__PORT?",
        "the variable MILLSTREAM_TOPICS_AUTO_CREATE sets nothing; did you mean MILLSTREAM_TOPICS__AUTO_CREATE?",
    ]


def test_no_variable_that_means_something_is_taken_for_a_misspelt_setting() -> None:
    """Those of clients, of examples and of these tests."""
    others = ["BROKER", "NAMESPACE", "KEY", "CA", "CONFIG", "DEBUG", "SEED", "WEBHOOK_SECRET", "SPARK_LOG"]
    assert overlooked_variables({f"MILLSTREAM_{name}": "x" for name in others}) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64MiB", 64 * 1024**2),
        ("64 mib", 64 * 1024**2),
        ("10 GB", 10 * 1000**3),
        ("1.5KiB", 1536),
        (" 2TiB ", 2 * 1024**4),
        ("1_000B", 1000),
        (77, 77),
    ],
)
def test_sizes(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("250", 250), ("250ms", 250), ("30s", 30_000), ("5m", 300_000), ("5 min", 300_000), ("1.5h", 5_400_000),
     ("7d", 604_800_000), ("2W", 1_209_600_000), (5, 5)],
)  # fmt: skip
def test_durations(text: object, expected: int) -> None:
    assert parse_duration_ms(text) == expected


@pytest.mark.parametrize(
    "text", ["", "MiB", "64M", "-5", "1.0000001KiB", "64 MiB or so", "1e9", f"{'9' * 400}.5", "9" * 5000, None]
)
def test_what_is_not_a_size_comes_back_as_it_is(text: object) -> None:
    """The model then refuses it with the sentence for its key."""
    assert parse_bytes(text) == text


@pytest.mark.parametrize(
    ("yaml_text", "expected"),
    [
        ("server:\n  prot: 1\n", "unknown setting 'server.prot' (m.yaml line 2); did you mean 'server.port'?"),
        ("port: 1\n", "unknown section 'port' (m.yaml line 1); did you mean 'server.port'?"),
        ("\nsever:\n  port: 1\n", "unknown section 'sever' (m.yaml line 2); did you mean 'server'?"),
        ("log:\n  port: 1\n", "unknown setting 'log.port' (m.yaml line 2); did you mean 'server.port'?"),
        ("zebra:\n  stripes: 1\n", "known sections: server, http, mqtt, storage, topics, groups, schedules, "),
    ],
)
def test_unknown_keys_are_errors_with_a_suggestion(yaml_text: str, expected: str) -> None:
    assert expected in problem_of(yaml_text)


@pytest.mark.parametrize(
    ("yaml_text", "expected"),
    [
        (
            "server:\n  port: 99999\n",
            "server.port = 99999 (m.yaml line 2) is not allowed: use a whole number from 0 to 65,535",
        ),
        ("server:\n  port: yes\n", "server.port = yes (m.yaml line 2) is not allowed"),
        ("server:\n  port:\n", "server.port = nothing (m.yaml line 2) is not allowed"),
        ("server:\n  port: [1]\n", "server.port must be a single value (m.yaml line 2)"),
        ("server:\n  heartbeat_ms: 1:30\n", "use a duration such as 500ms, 30s or 7d, from 100 to 3,600,000 ms"),
        ("storage:\n  segment_bytes: 10 GB\n", "use a size such as 512KiB or 64MiB, from 4,096 to 1,073,741,824 bytes"),
        ("storage:\n  fsync: grup\n", "use group, interval, always or never"),
        ("topics:\n  auto_create: maybe\n", "use true or false"),
        ("storage:\n  data: ''\n", "storage.data = nothing (m.yaml line 2) is not allowed: use a text"),
        ("server: 5\n", "server must hold keys and values (m.yaml line 1)"),
        ("- 1\n", "the file must hold sections"),
        ("server:\n  port: 1\n  port: 2\n", "'port' is given twice (m.yaml line 3)"),
        ("server: [1\n", "m.yaml line 2 is not valid YAML"),
        ("\x00", "m.yaml is not valid YAML"),
        ("server: " + "[" * 1000, "m.yaml: too many lists and mappings are inside each other"),
    ],
)
def test_bad_values_name_key_value_place_and_what_is_allowed(yaml_text: str, expected: str) -> None:
    problem = problem_of(yaml_text)
    assert expected in problem
    assert "\n" not in problem


def test_a_key_longer_than_any_name_is_not_compared_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difflib.get_close_matches", lambda *_, **__: pytest.fail("nobody means anything by it"))
    assert "; known sections: " in problem_of(f"{'x' * 300}: 1\n")


def test_mistakes_in_the_environment_and_in_flags_name_them() -> None:
    assert "(MILLSTREAM_SERVER__PORT)" in problem_of(env={"MILLSTREAM_SERVER__PORT": "x"})
    assert "did you mean 'server.port'?" in problem_of(env={"MILLSTREAM_SERVR__PORT": "1"})
    assert "storage.fsync = sometimes (--fsync) is not allowed" in problem_of(storage__fsync="sometimes")


def test_long_values_are_cut_in_messages() -> None:
    assert len(problem_of(f"server:\n  port: {'9' * 5000}\n")) < 200


def test_limits_must_fit_into_each_other() -> None:
    assert "topics.max_message_bytes = 1,048,576 (default)" in problem_of("server: {frame_bytes_max: 1MiB}")
    assert "must be at least server.frame_bytes_max" in problem_of("server: {connection_memory_bytes: 1MiB}")


def test_texts_stay_texts() -> None:
    """YAML would read these as numbers; a directory may well be called 0123."""
    settings, _ = load_settings("storage: {data: 0123}\nserver: {host: 1.10}\n", {}, {})
    assert (settings.storage.data, settings.server.host) == ("0123", "1.10")


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_is_described(key: str) -> None:
    field = dict(setting_fields())[key]
    assert field.description, f"{key} needs a description: it is its line in the reference"
    assert field.description.endswith(".")
    assert allowed_values(key)


def test_every_flag_belongs_to_a_setting() -> None:
    assert set(FLAGS) <= set(KEYS)
