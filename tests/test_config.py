"""`KPoolConfig`: what it refuses, what it reads, and who wins when two places say different things."""

from __future__ import annotations

import argparse
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kpool.config import SHARD_QUERIES_ENV, KPoolConfig, add_kpool_args, resolve_shard_queries

SMALL = {
    "hidden_size": 64,
    "q_lora_rank": 32,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 32,
    "index_kpool": 4,
    "index_kpool_always_select_tail": False,
}
SWITCH = "dsa_indexer_kpool_shard_queries_across_tp"


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_kpool_args(parser)
    return parser.parse_args(list(argv))


class TestFields:
    def test_defaults_are_the_released_model(self) -> None:
        config = KPoolConfig()
        assert (config.index_n_heads, config.index_head_dim, config.index_topk, config.index_kpool) == (
            32,
            128,
            2048,
            4,
        )
        assert (config.pool_budget, config.width) == (512, 2051)

    def test_both_names_of_a_field_hold_one_value(self) -> None:
        by_model_name = KPoolConfig(**SMALL)
        by_framework_name = KPoolConfig(
            **{k: v for k, v in SMALL.items() if not k.startswith("index_kpool")},
            dsa_indexer_kpool=4,
            dsa_indexer_kpool_always_select_tail=False,
        )
        assert by_model_name == by_framework_name
        assert by_framework_name.width == 32

    def test_replace_by_either_name(self) -> None:
        config = KPoolConfig(**SMALL)
        assert config.replace(index_kpool=8) == config.replace(dsa_indexer_kpool=8)
        assert config.replace(index_kpool=8).dsa_indexer_kpool == 8
        assert config.replace(index_topk=64).index_kpool == 4

    @pytest.mark.parametrize(
        "changes, error, text",
        [
            ({"index_topk": 30}, ValueError, "index_topk: expected a multiple"),
            ({"index_kpool": 0}, ValueError, "index_kpool: expected at least 1"),
            ({"index_n_heads": -1}, ValueError, "index_n_heads"),
            ({"index_head_dim": 16.0}, TypeError, "index_head_dim"),
            ({"hidden_size": "64"}, TypeError, "hidden_size"),
            ({"q_lora_rank": True}, TypeError, "q_lora_rank"),
            ({"index_kpool_always_select_tail": "yes"}, TypeError, "always_select_tail"),
            ({"dsa_indexer_kpool": 2}, ValueError, "another name of index_kpool"),
            ({"dsa_indexer_kpool_always_select_tail": True}, ValueError, "another name"),
            ({SWITCH: 1}, TypeError, SWITCH),
            ({"check_replicated": -1}, ValueError, "check_replicated"),
            ({"check_replicated": "always"}, TypeError, "check_replicated"),
            ({"index_pool": 4}, TypeError, "index_pool"),
        ],
    )
    def test_refuses(self, changes: dict[str, Any], error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            KPoolConfig(**{**SMALL, **changes})

    def test_check_replicated_every_n_calls(self) -> None:
        assert KPoolConfig().check_replicated == 0
        assert KPoolConfig(check_replicated=100).check_replicated == 100
        assert KPoolConfig(check_replicated=True).check_replicated == 1


class TestFromHf:
    def test_dict_object_and_nesting_agree(self) -> None:
        expected = KPoolConfig(**SMALL)
        assert KPoolConfig.from_hf(SMALL) == expected
        assert KPoolConfig.from_hf(SimpleNamespace(**SMALL)) == expected
        assert KPoolConfig.from_hf({"model_type": "glm5_next", "text_config": SMALL}) == expected
        assert KPoolConfig.from_hf(SimpleNamespace(text_config=SimpleNamespace(**SMALL))) == expected
        assert KPoolConfig.from_hf(SimpleNamespace(text_config=SMALL)) == expected

    def test_missing_keys_have_the_defaults_of_hugging_face(self) -> None:
        config = KPoolConfig.from_hf({"index_topk": 1024})
        assert (config.index_topk, config.index_kpool, config.index_kpool_always_select_tail) == (
            1024,
            16,
            True,
        )

    @pytest.mark.hf
    def test_defaults_are_those_of_transformers(self) -> None:
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig, Glm5NextTextConfig

        theirs = Glm5NextTextConfig()
        ours = KPoolConfig.from_hf({"model_type": "glm5_next_text"})
        assert ours == KPoolConfig.from_hf(theirs) == KPoolConfig.from_hf(Glm5NextConfig())
        assert ours == KPoolConfig.from_hf(theirs.to_dict()) == KPoolConfig.from_hf(theirs.to_diff_dict())
        for name in SMALL:
            assert getattr(ours, name) == getattr(theirs, name)

    def test_overrides_win(self) -> None:
        config = KPoolConfig.from_hf(SMALL, dsa_indexer_kpool=8, check_replicated=5)
        assert (config.index_kpool, config.check_replicated) == (8, 5)

    def test_refuses_a_configuration_without_an_indexer(self) -> None:
        with pytest.raises(ValueError, match=r"got none in a configuration of model_type='llama'"):
            KPoolConfig.from_hf({"model_type": "llama", "hidden_size": 64})
        with pytest.raises(TypeError, match="NoneType"):
            KPoolConfig.from_hf(None)

    def test_refuses_rotary(self) -> None:
        with pytest.raises(ValueError, match="qk_rope_head_dim 0"):
            KPoolConfig.from_hf({**SMALL, "qk_rope_head_dim": 64})

    def test_refuses_two_names_that_disagree(self) -> None:
        with pytest.raises(ValueError, match="another name"):
            KPoolConfig.from_hf(SMALL, dsa_indexer_kpool=8, index_kpool=2)


class TestTheSwitch:
    @pytest.mark.parametrize(
        "explicit, flag, env",
        list(itertools.product([None, True, False], [None, True, False], [None, "1", "0"])),
    )
    def test_precedence(self, explicit: bool | None, flag: bool | None, env: str | None) -> None:
        """explicit > flag > environment > off, over all 27 combinations and both ways of asking."""
        environ = {} if env is None else {SHARD_QUERIES_ENV: env}
        expected = next((v for v in (explicit, flag, None if env is None else env == "1") if v is not None), False)
        assert resolve_shard_queries(explicit, flag, environ=environ) is expected
        argv = [] if flag is None else ["--dsa-indexer-kpool-shard-queries-across-tp"]
        if flag is False:
            argv = ["--no-dsa-indexer-kpool-shard-queries-across-tp"]
        said = {} if explicit is None else {SWITCH: explicit}
        config = KPoolConfig.from_args(parse(*argv), environ=environ, **said)
        assert config.dsa_indexer_kpool_shard_queries_across_tp is expected
        assert config.shard_queries_across_tp is expected

    def test_unset_is_off(self) -> None:
        assert KPoolConfig().dsa_indexer_kpool_shard_queries_across_tp is None
        assert KPoolConfig().shard_queries_across_tp is False

    def test_only_from_env_reads_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SHARD_QUERIES_ENV, "1")
        assert KPoolConfig().shard_queries_across_tp is False
        assert KPoolConfig.from_hf(SMALL).shard_queries_across_tp is False
        assert KPoolConfig(**SMALL).replace(index_topk=64).shard_queries_across_tp is False
        assert KPoolConfig.from_env().shard_queries_across_tp is True
        assert KPoolConfig.from_env(KPoolConfig(**SMALL)).hidden_size == 64

    def test_resolved_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SHARD_QUERIES_ENV, "1")
        config = KPoolConfig.from_env()
        monkeypatch.setenv(SHARD_QUERIES_ENV, "0")
        assert config.shard_queries_across_tp is True
        assert KPoolConfig.from_env(config).shard_queries_across_tp is True

    @pytest.mark.parametrize("text", ["maybe", "2", "yes please", "-1"])
    def test_unknown_environment_value(self, text: str) -> None:
        with pytest.raises(ValueError, match=f"{SHARD_QUERIES_ENV}: expected 1 or 0"):
            KPoolConfig.from_env(environ={SHARD_QUERIES_ENV: text})
        assert KPoolConfig.from_env(environ={SHARD_QUERIES_ENV: text}, **{SWITCH: True}).shard_queries_across_tp

    @pytest.mark.parametrize("text, value", [("", False), ("ON", True), (" true ", True), ("No", False)])
    def test_known_environment_values(self, text: str, value: bool) -> None:
        assert KPoolConfig.from_env(environ={SHARD_QUERIES_ENV: text}).shard_queries_across_tp is value


class TestFlags:
    def test_nothing_given_changes_nothing(self) -> None:
        base = KPoolConfig(**SMALL)
        assert KPoolConfig.from_args(parse(), base, environ={}) == base.replace(**{SWITCH: False})

    def test_every_flag_arrives(self) -> None:
        config = KPoolConfig.from_args(
            parse(
                "--dsa-indexer-kpool=16",
                "--no-dsa-indexer-kpool-always-select-tail",
                "--dsa-indexer-kpool-shard-queries-across-tp",
                "--dsa-indexer-kpool-check-replicated=50",
            ),
            environ={},
        )
        assert (config.index_kpool, config.index_kpool_always_select_tail) == (16, False)
        assert (config.shard_queries_across_tp, config.check_replicated) == (True, 50)

    def test_explicit_beats_flag_by_either_name(self) -> None:
        args = parse("--dsa-indexer-kpool=16")
        assert KPoolConfig.from_args(args, environ={}, index_kpool=8).index_kpool == 8
        assert KPoolConfig.from_args(args, environ={}, dsa_indexer_kpool=8).index_kpool == 8

    def test_a_base_that_said_no_beats_the_environment(self) -> None:
        base = KPoolConfig(dsa_indexer_kpool_shard_queries_across_tp=False)
        assert KPoolConfig.from_args(parse(), base, environ={SHARD_QUERIES_ENV: "1"}).shard_queries_across_tp is False

    @pytest.mark.parametrize(
        "argv",
        [
            ["--dsa-indexer-kpool-shard-queries-across-tp=maybe"],
            ["--dsa-indexer-kpool=0"],
            ["--dsa-indexer-kpool=four"],
            ["--dsa-indexer-kpool-check-replicated=-1"],
        ],
    )
    def test_unknown_values_are_errors(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            parse(*argv)
        assert "error: argument --dsa-indexer-kpool" in capsys.readouterr().err
