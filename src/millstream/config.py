"""The broker's settings: one typed model, and the rule by which file, environment and flags make it.

A setting is a section and a key, `server.port`.  The YAML file is overruled by `MILLSTREAM_SERVER__PORT` and that by
flags, and for each value the loader remembers which of them it came from, so that a mistake can be found as easily as
it is reported.  Nothing here reads files or the environment: texts and mappings come in as arguments.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from millstream.errors import ConfigInvalid
from millstream.names import closest
from millstream.sections import (
    AccessSettings,
    GroupSettings,
    HttpSettings,
    LimitSettings,
    LogSettings,
    MetricsSettings,
    MqttSettings,
    PipelineSettings,
    ScheduleSettings,
    Section,
    ServerSettings,
    StageSettings,
    StorageRule,
    StorageSettings,
    TlsSettings,
    TopicSettings,
    TraceSettings,
    WebhookSettings,
    parse_bytes,
    parse_duration_ms,
)

__all__ = [
    "FLAGS",
    "AccessSettings",
    "GroupSettings",
    "HttpSettings",
    "LimitSettings",
    "LogSettings",
    "MetricsSettings",
    "MqttSettings",
    "PipelineSettings",
    "ScheduleSettings",
    "ServerSettings",
    "Settings",
    "StageSettings",
    "StorageRule",
    "StorageSettings",
    "TlsSettings",
    "TopicSettings",
    "TraceSettings",
    "WebhookSettings",
    "allowed_values",
    "environment_name",
    "load_settings",
    "overlooked_variables",
    "parse_bytes",
    "parse_duration_ms",
    "setting_fields",
]

ENVIRONMENT_PREFIX: Final = "MILLSTREAM_"

#: Settings that have a flag of their own on `millstream serve` and `millstream config show`.
FLAGS: Final[Mapping[str, str]] = {
    "server.host": "--host",
    "server.port": "--port",
    "http.port": "--http-port",
    "mqtt.port": "--mqtt-port",
    "storage.data": "--data",
    "storage.fsync": "--fsync",
    "access.insecure": "--insecure",
    "log.level": "--log-level",
    "log.format": "--log-format",
}

#: For logs and sockets of the broker itself, and for clients that are told why they cannot come in.
_SPARE_DESCRIPTORS: Final = 128


class Settings(Section):
    """Everything that can be set about a broker."""

    server: ServerSettings = ServerSettings()
    http: HttpSettings = HttpSettings()
    mqtt: MqttSettings = MqttSettings()
    storage: StorageSettings = StorageSettings()
    topics: TopicSettings = TopicSettings()
    groups: GroupSettings = GroupSettings()
    schedules: ScheduleSettings = ScheduleSettings()
    stages: StageSettings = StageSettings()
    pipelines: PipelineSettings = PipelineSettings()
    webhooks: WebhookSettings = WebhookSettings()
    access: AccessSettings = AccessSettings()
    tls: TlsSettings = TlsSettings()
    limits: LimitSettings = LimitSettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TraceSettings = TraceSettings()
    log: LogSettings = LogSettings()

    @property
    def is_public(self) -> bool:
        """Whether other machines can connect."""
        host = self.server.host
        if host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
        except ValueError:
            return True

    @property
    def descriptors_needed(self) -> int:
        """How many files and sockets the broker may have open at a time."""
        doors = 1 + self.http.enabled + self.mqtt.enabled
        return self.storage.open_files_max + doors * self.server.max_connections + _SPARE_DESCRIPTORS

    @property
    def needs_keys(self) -> bool:
        """Whether clients need an API key."""
        mode = self.access.mode
        return mode == "keys" or (mode == "auto" and self.is_public and not self.access.insecure)

    @property
    def keeps_audit(self) -> bool:
        return self.access.audit == "on" or (self.access.audit == "auto" and self.needs_keys)


def setting_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting as `section.key`, in the order of the reference."""
    for section, field in Settings.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for key, leaf in model.model_fields.items():
            yield f"{section}.{key}", leaf


_FIELDS: Final = dict(setting_fields())


def environment_name(key: str) -> str:
    """The variable that sets `section.key`."""
    return ENVIRONMENT_PREFIX + key.replace(".", "__").upper()


def allowed_values(key: str) -> str:
    """What a setting accepts, as it reads after "use" in a sentence."""
    field = _FIELDS[key]
    if get_origin(field.annotation) is Literal:
        *most, last = [str(choice) for choice in get_args(field.annotation)]
        return f"{', '.join(most)} or {last}"
    if field.annotation is bool:
        return "true or false"
    if field.annotation is str:
        return str(field.examples[0]) if field.examples else "a text that is not empty"
    low, high = (_bound(field, name) for name in ("ge", "le"))
    if "_ms" in key:
        return f"a duration such as 500ms, 30s or 7d, from {low:,} to {high:,} ms"
    if "bytes" in key:
        return f"a size such as 512KiB or 64MiB, from {low:,} to {high:,} bytes"
    if field.annotation is float:
        return f"a number from {low:,} to {high:,}, such as 0.5"
    return f"a whole number from {low:,} to {high:,}"


def _bound(field: FieldInfo, name: str) -> int:
    return next(int(getattr(rule, name)) for rule in field.metadata if hasattr(rule, name))


class _Given(NamedTuple):
    """A setting as it was given, and the words that say where."""

    key: str
    value: object
    source: str


def load_settings(
    yaml_text: str | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    *,
    overrides: Mapping[str, str] | None = None,
    file_name: str = "the configuration file",
) -> tuple[Settings, dict[str, str]]:
    """The settings, and for each `section.key` where its value came from.

    `flags` maps `section.key` to the value of the setting's own flag, None if that was not given; `overrides` are the
    pairs of `--set`, below flags and above everything else.  Raises ConfigInvalid with one sentence that names the key,
    the value, its source and what is allowed.
    """
    given: dict[str, _Given] = {}
    nested: dict[str, dict[str, object]] = {}
    for entry in chain(
        _from_yaml(yaml_text or "", file_name),
        _from_environment(env),
        (_Given(key, value, "--set") for key, value in (overrides or {}).items()),
        (_Given(key, value, FLAGS[key]) for key, value in flags.items() if value is not None),
    ):
        if entry.key not in _FIELDS:
            raise ConfigInvalid(f"unknown setting {entry.key!r} ({entry.source}){_suggestion(entry.key)}")
        given[entry.key] = entry
        section, name = entry.key.split(".")
        nested.setdefault(section, {})[name] = entry.value
    try:
        settings = Settings.model_validate(nested)
    except ValidationError as problem:
        entry = given[".".join(str(part) for part in problem.errors()[0]["loc"][:2])]
        raise ConfigInvalid(
            f"{entry.key} = {_shown(entry.value)} ({entry.source}) is not allowed: use {allowed_values(entry.key)}"
        ) from None
    sources = {key: given[key].source if key in given else "default" for key in _FIELDS}
    _check_together(settings, sources)
    return settings, sources


def _check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """Limits that contain each other; a broker that violates them would refuse what it advertises."""
    frame, message = settings.server.frame_bytes_max, settings.topics.max_message_bytes
    memory = settings.server.connection_memory_bytes
    if message >= frame:
        key, value, relation = "topics.max_message_bytes", message, "smaller than"
    elif memory < frame:
        key, value, relation = "server.connection_memory_bytes", memory, "at least"
    else:
        return
    raise ConfigInvalid(
        f"{key} = {value:,} ({sources[key]}) is not allowed: it must be {relation} server.frame_bytes_max, "
        f"which is {frame:,} ({sources['server.frame_bytes_max']})"
    )


def _from_yaml(text: str, file_name: str) -> Iterator[_Given]:
    """Settings of a YAML text.

    Walks the node tree instead of loading it: that keeps the line numbers, finds the key given twice (the loader would
    take the last) and leaves the reading of values to the model (YAML takes 1:30 for the number 90).
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as problem:
        line = f" line {problem.problem_mark.line + 1}" if problem.problem_mark else ""
        raise ConfigInvalid(
            f"{file_name}{line} is not valid YAML: {(problem.problem or '').removeprefix('but ')}"
        ) from None
    except yaml.YAMLError as problem:
        raise ConfigInvalid(f"{file_name} is not valid YAML: {' '.join(str(problem).split())}") from None
    except RecursionError:
        raise ConfigInvalid(f"{file_name}: too many lists and mappings are inside each other") from None
    if root is None:
        return
    for section, section_node, place in _entries(root, file_name, "the file", "sections such as `server:`"):
        if section not in Settings.model_fields:
            raise ConfigInvalid(f"unknown section {section!r} ({place}){_suggestion(section)}")
        if _is_null(section_node):  # a section whose lines are all commented out
            continue
        for key, node, place in _entries(section_node, file_name, section, "keys and values"):
            if not isinstance(node, yaml.ScalarNode):
                raise ConfigInvalid(f"{section}.{key} must be a single value ({place})")
            yield _Given(f"{section}.{key}", None if _is_null(node) else node.value, place)


def _entries(node: yaml.Node, file_name: str, what: str, expected: str) -> Iterator[tuple[str, yaml.Node, str]]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigInvalid(f"{what} must hold {expected} ({file_name} line {node.start_mark.line + 1})")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
        place = f"{file_name} line {key_node.start_mark.line + 1}"
        if key in seen:
            raise ConfigInvalid(f"{key!r} is given twice ({place})")
        seen.add(key)
        yield key, value_node, place


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _from_environment(env: Mapping[str, str]) -> Iterator[_Given]:
    """Settings among the variables: those with a double underscore.

    Others are not ours to refuse: Kubernetes gives every pod beside a service called `millstream` a MILLSTREAM_PORT.
    """
    for name in sorted(env):
        rest = name.removeprefix(ENVIRONMENT_PREFIX)
        if rest != name and "__" in rest:
            yield _Given(rest.lower().replace("__", ".", 1), env[name], name)


def overlooked_variables(env: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that was surely meant as a setting and is none.

    No error: it could be of a service of that name, though not with what Kubernetes puts into those, `tcp://...`.
    """
    meant = {environment_name(key).replace("__", "_"): environment_name(key) for key in _FIELDS}
    for key, flag in FLAGS.items():
        meant.setdefault(ENVIRONMENT_PREFIX + flag.strip("-").replace("-", "_").upper(), environment_name(key))
    return [
        f"the variable {name} sets nothing; did you mean {meant[name]}?"
        for name in sorted(env)
        if name in meant and not env[name].startswith("tcp://")
    ]


#: Settings have words in common, so what is only somewhat like one of them is a wrong guess.
_LIKENESS: Final = 0.75


def _suggestion(key: str) -> str:
    """`; did you mean ...?`, for a misspelt key as well as for a right one in the wrong section."""
    places: dict[str, str] = {}
    for known in _FIELDS:
        places.setdefault(known.partition(".")[2], known)
    *_, name = key.split(".")
    if key != name and name in places:
        return f"; did you mean {places[name]!r}?"
    meant = closest(key, [*Settings.model_fields, *_FIELDS], _LIKENESS)
    if meant is None and (found := closest(name, places, _LIKENESS)) is not None:
        meant = places[found]
    return f"; known sections: {', '.join(Settings.model_fields)}" if meant is None else f"; did you mean {meant!r}?"


def _shown(value: object) -> str:
    text = "nothing" if value is None or value == "" else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
