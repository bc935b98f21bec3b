"""`KPoolConfig`: what the k-pool indexer needs to know, and where each value may come from.

The sizes are named as in a Hugging Face `glm5_next` configuration; three of them also have the names training
frameworks use (`dsa_indexer_kpool*`). The sharding switch can be said in four places; the first that says
anything wins:

    explicit argument  >  command-line flag  >  environment variable  >  default (off)

Only `from_env` and the framework adapters read the environment. A plain constructor never does, so that two
processes which build the same object hold the same object.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["SHARD_QUERIES_ENV", "KPoolConfig", "add_kpool_args", "resolve_shard_queries"]

SHARD_QUERIES_ENV = "SKYRL_DSA_INDEXER_TP_SHARD"

_SIZES = ("hidden_size", "q_lora_rank", "index_n_heads", "index_head_dim", "index_topk", "index_kpool")
_SHARED_NAMES = (*_SIZES, "index_kpool_always_select_tail")
# What `transformers` fills in for a key that a saved config.json leaves out because it equals the class
# default.
_HF_DEFAULTS: dict[str, int | bool] = {
    "hidden_size": 4096,
    "q_lora_rank": 1536,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_kpool": 16,
    "index_kpool_always_select_tail": True,
}
_ALIASES = {
    "dsa_indexer_kpool": "index_kpool",
    "dsa_indexer_kpool_always_select_tail": "index_kpool_always_select_tail",
}
_ENV_VALUES: dict[str, bool | None] = {
    "": None,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
}


@dataclass(frozen=True)
class KPoolConfig:
    """The sizes of a k-pool indexer and the switches around it. The defaults are the released GLM-5.3-Flash.

    Fields:
        hidden_size, q_lora_rank: widths of the two inputs of the indexer.
        index_n_heads `H`, index_head_dim `D`: shape of the index queries.
        index_topk `K`: selected tokens per row, a multiple of the pool size.
        index_kpool `P`: tokens per pool.
        index_kpool_always_select_tail: whether a row also gets the tokens of its incomplete pool.
        dsa_indexer_kpool, dsa_indexer_kpool_always_select_tail: the training-framework names of the two
            fields above. None means "not said"; after construction both names hold the same value.
        dsa_indexer_kpool_shard_queries_across_tp: True or False, or None for "not said". Read it through
            `shard_queries_across_tp`, which resolves None to off.
        check_replicated: compare checksums of the inputs across the shard group every so many calls; 0 is
            never.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a size below one, `index_topk` not a multiple of the pool size, or two names of one field
            that disagree.
    """

    hidden_size: int = 4096
    q_lora_rank: int = 1536
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 2048
    # None in these two means "from the other name, else 4 and True"; after construction they are never None.
    index_kpool: int = None  # type: ignore[assignment]
    index_kpool_always_select_tail: bool = None  # type: ignore[assignment]
    dsa_indexer_kpool: int | None = None
    dsa_indexer_kpool_always_select_tail: bool | None = None
    dsa_indexer_kpool_shard_queries_across_tp: bool | None = None
    check_replicated: int = 0

    def __post_init__(self) -> None:
        for alias, name in _ALIASES.items():
            self._unify(alias, name, 4 if name == "index_kpool" else True)
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        _check_bool("index_kpool_always_select_tail", self.index_kpool_always_select_tail)
        if self.dsa_indexer_kpool_shard_queries_across_tp is not None:
            _check_bool("dsa_indexer_kpool_shard_queries_across_tp", self.dsa_indexer_kpool_shard_queries_across_tp)
        _check_interval(self.check_replicated)
        object.__setattr__(self, "check_replicated", int(self.check_replicated))
        if self.index_topk % self.index_kpool:
            raise ValueError(
                f"index_topk: expected a multiple of the pool size index_kpool={self.index_kpool}, "
                f"got {self.index_topk}"
            )

    def _unify(self, alias: str, name: str, default: int | bool) -> None:
        said, also = getattr(self, name), getattr(self, alias)
        if said is not None and also is not None and said != also:
            raise ValueError(f"{alias} is another name of {name}: expected one value, got {also!r} and {said!r}")
        value = said if said is not None else also if also is not None else default
        object.__setattr__(self, name, value)
        object.__setattr__(self, alias, value)

    @property
    def pool_budget(self) -> int:
        """`M = K // P`, the number of pools a row may select."""
        return self.index_topk // self.index_kpool

    @property
    def width(self) -> int:
        """Slots of a result row: `K + P - 1` with tail, `K` without."""
        return self.index_topk + (self.index_kpool - 1 if self.index_kpool_always_select_tail else 0)

    @property
    def shard_queries_across_tp(self) -> bool:
        """The sharding switch with "not said" resolved to off. Reads no environment."""
        return resolve_shard_queries(self.dsa_indexer_kpool_shard_queries_across_tp, environ={})

    def replace(self, **changes: Any) -> KPoolConfig:
        """A copy with some fields changed. Either name of a field with two names may be given.

        Raises:
            TypeError: for a name that is no field.
        """
        return replace(self, **_with_both_names(changes))

    @classmethod
    def from_hf(cls, config: object, **overrides: Any) -> KPoolConfig:
        """Read the sizes from a Hugging Face configuration.

        Args:
            config: a config object or the dict of a `config.json`; the fields may sit in a nested
                `text_config`.
            **overrides: fields of this class that win over the configuration.

        A key the configuration leaves out has the default of the Hugging Face class (pool size 16, where the
        released model says 4), because `save_pretrained` omits keys that equal their default.

        Raises:
            ValueError: no indexer field is found at all, or the model rotates its queries (`qk_rope_head_dim`
                above zero).
        """
        source = _text_config(config)
        found = {name: source[name] for name in _SHARED_NAMES if source.get(name) is not None}
        model_type = source.get("model_type")
        if not any(name.startswith("index_") for name in found) and not str(model_type).startswith("glm5_next"):
            raise ValueError(
                "config: expected the fields of a k-pool indexer (index_topk, index_kpool, ...), at the top "
                f"or in text_config, got none in a configuration of model_type={model_type!r}"
            )
        if source.get("qk_rope_head_dim"):
            raise ValueError(
                f"config: expected qk_rope_head_dim 0 (no rotary part), got {source['qk_rope_head_dim']!r}"
            )
        return cls(**{**_HF_DEFAULTS, **found, **_with_both_names(overrides, drop_alias=True)})

    @classmethod
    def from_env(
        cls, base: KPoolConfig | None = None, *, environ: Mapping[str, str] | None = None, **explicit: Any
    ) -> KPoolConfig:
        """`base` (default: the released model) with `explicit` fields, the sharding switch resolved with the
        environment.

        The switch of the result is True or False, never None: it has been read once and does not change
            afterwards.

        Args:
            base: configuration to start from; a switch it has said wins over the environment.
            environ: mapping to read instead of `os.environ`.

        Raises:
            ValueError: the environment variable holds a value other than 1/0, true/false, on/off, yes/no or
                nothing.
        """
        config = (base if base is not None else cls()).replace(**explicit)
        said = config.dsa_indexer_kpool_shard_queries_across_tp
        return replace(config, dsa_indexer_kpool_shard_queries_across_tp=resolve_shard_queries(said, environ=environ))

    @classmethod
    def from_args(
        cls,
        args: argparse.Namespace,
        base: KPoolConfig | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        **explicit: Any,
    ) -> KPoolConfig:
        """`base` with the flags of `add_kpool_args`, then `explicit` fields; the switch resolved as in
        `from_env`.

        A flag that was not given leaves the field of `base` as it is.

        Raises:
            ValueError: as the constructor and `from_env`.
        """
        named = {f.name for f in fields(cls)}
        given = {name: value for name, value in vars(args).items() if name in named and value is not None}
        if "dsa_indexer_kpool_check_replicated" in vars(args) and args.dsa_indexer_kpool_check_replicated is not None:
            given["check_replicated"] = args.dsa_indexer_kpool_check_replicated
        chosen = {**_with_both_names(given), **_with_both_names(explicit)}
        return cls.from_env((base if base is not None else cls()).replace(**chosen), environ=environ)


def resolve_shard_queries(
    explicit: bool | None = None, flag: bool | None = None, *, environ: Mapping[str, str] | None = None
) -> bool:
    """Whether query rows are sharded: the first of explicit argument, flag, environment that says anything,
    else off.

    Args:
        environ: mapping to read instead of `os.environ`; an empty one switches the environment off.

    Raises:
        TypeError: `explicit` or `flag` is neither None nor a bool.
        ValueError: the environment variable is read and holds an unknown value.
    """
    for name, value in (("explicit", explicit), ("flag", flag)):
        if value is not None:
            _check_bool(name, value)
            return value
    text = (os.environ if environ is None else environ).get(SHARD_QUERIES_ENV, "")
    if text.strip().lower() not in _ENV_VALUES:
        raise ValueError(f"{SHARD_QUERIES_ENV}: expected 1 or 0 (true/false, on/off, yes/no), got {text!r}")
    return bool(_ENV_VALUES[text.strip().lower()])


def add_kpool_args(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the k-pool flags to an argparse parser; every one defaults to None, "not said".

    The destinations are the field names, so a framework that copies its namespace into its own config gets
    them too; `KPoolConfig.from_args` reads them. Returns the argument group.
    """
    group = parser.add_argument_group("k-pool indexer")
    group.add_argument(
        "--dsa-indexer-kpool",
        type=_positive,
        metavar="P",
        help="tokens per pool of the sparse-attention indexer",
    )
    group.add_argument(
        "--dsa-indexer-kpool-always-select-tail",
        action=argparse.BooleanOptionalAction,
        help="also select the tokens of a row's incomplete pool",
    )
    group.add_argument(
        "--dsa-indexer-kpool-shard-queries-across-tp",
        action=argparse.BooleanOptionalAction,
        help=f"score each query row on one tensor-parallel rank only (environment: {SHARD_QUERIES_ENV}=1)",
    )
    group.add_argument(
        "--dsa-indexer-kpool-check-replicated",
        type=_interval,
        metavar="N",
        help="compare checksums of the inputs across tensor-parallel ranks every N calls (0: never)",
    )
    return group


def _with_both_names(changes: Mapping[str, Any], *, drop_alias: bool = False) -> dict[str, Any]:
    """Give both names of a field the one value that was said, so that neither old value contradicts it."""
    out = dict(changes)
    for alias, name in _ALIASES.items():
        if alias in out and name in out and out[alias] != out[name]:
            raise ValueError(
                f"{alias} is another name of {name}: expected one value, got {out[alias]!r} and {out[name]!r}"
            )
        if alias in out or name in out:
            out[name] = out[alias] = out[name] if name in out else out[alias]
            if drop_alias:
                del out[alias]
    return out


def _text_config(config: object) -> dict[str, Any]:
    """The fields of `config`, or of the `text_config` nested in it, as a dict."""
    nested = config.get("text_config") if isinstance(config, Mapping) else getattr(config, "text_config", None)
    if nested is not None:
        return _text_config(nested)
    if isinstance(config, Mapping):
        return dict(config)
    if config is None or isinstance(config, (str, bytes, int, float)):
        raise TypeError(f"config: expected a configuration object or dict, got {type(config).__name__}")
    names = (*_SHARED_NAMES, "model_type", "qk_rope_head_dim")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def _check_interval(value: object) -> None:
    if not isinstance(value, int):
        raise TypeError(f"check_replicated: expected a number of calls (0 is never), got {value!r}")
    if value < 0:
        raise ValueError(f"check_replicated: expected 0 or more, got {value}")


def _positive(text: str) -> int:
    value = _interval(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _interval(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {value}")
    return value
