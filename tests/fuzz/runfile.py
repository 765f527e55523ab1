"""A run file in TOML, and an override."""

from tierstore.settings.sections import to_toml
from tierstore.train import RunConfig
from tierstore.train.config import ConfigError, load, parse_override

from .target import FindingError, Target, scratch_folder

_PATH = scratch_folder() / "run.toml"


def run(data: bytes) -> None:
    """The bytes are the file; if the first is ``!``, the rest is an override."""
    overrides = []
    try:
        if data[:1] == b"!":
            overrides = [parse_override(data[1:].decode(errors="replace"))]
            data = b""
        _PATH.write_bytes(data)
        config = load(_PATH, overrides)
    except ConfigError as error:
        if len(str(error)) > 1000:
            raise FindingError("an error without bound") from error
        return
    _PATH.write_text(to_toml(config), encoding="utf-8")
    if load(_PATH) != config:
        raise FindingError(f"{config} is read back as another")


def seeds() -> list[bytes]:
    return [to_toml(RunConfig()).encode(), b'[store]\nddr = "5% of tables"\n', b"!train.batch_size=5"]


_WORDS = b"nan|inf|1e999|true|[[|]]|'''|\"\"\"|\\u0000|1979-05-27|0x|{a=|a.|[train]|[store]\n|ddr|\xff|= [\n|#"

TARGET = Target(run=run, seeds=seeds, dictionary=tuple(_WORDS.split(b"|")))
