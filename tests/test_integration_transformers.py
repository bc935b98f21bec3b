"""`use_kpool` on a small random `glm5_next` model: the same logits, the same generated tokens, and a way back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kpool.indexer import KPoolIndexer
from kpool.integrations.transformers import KPoolTransformersIndexer, use_kpool
from tests import glm5

pytestmark = pytest.mark.hf

LAYERS = ["linear_attention", "indexed_attention", "indexed_attention", "indexed_attention"]
SHARING = ["full", "full", "shared", "full"]


@pytest.fixture(scope="module")
def built() -> Any:
    """A model of four layers: two with an indexer, one that shares its neighbour's selection."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig, Glm5NextVisionConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

    vision = Glm5NextVisionConfig(
        depth=1,
        hidden_size=32,
        num_heads=2,
        intermediate_size=32,
        out_hidden_size=64,
        projection_intermediate_size=32,
    )
    tokens = {f"{kind}_token_id": 90 + i for i, kind in enumerate(("image", "video"))}
    tokens |= {f"{kind}_{end}_token_id": 93 for kind in ("image", "video") for end in ("start", "end")}
    text = glm5.text_config(layer_types=LAYERS, indexer_types=SHARING, index_topk=8, initializer_range=0.1)
    torch.manual_seed(0)
    model = Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision, **tokens)).eval()
    for layer, module in enumerate(indexers(model)):
        glm5.randomize(module, layer)
    return model


@pytest.fixture
def model(built: Any) -> Iterator[Any]:
    """The model, which every test must leave as it was."""
    before = indexers(built)
    yield built
    assert [id(m) for m in indexers(built)] == [id(m) for m in before]


def indexers(model: Any) -> list[Any]:
    return [m.indexer for m in model.modules() if getattr(m, "indexer", None) is not None]


def prompt(rows: int = 50, pad: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(1, 80, (2, rows), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Tensor], tokens: int = 12, **options: Any) -> Tensor:
    out = model.generate(
        **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **options
    )
    assert out.shape[1] == inputs["input_ids"].shape[1] + tokens
    return out


@torch.no_grad()
@pytest.mark.parametrize("pad", [0, 1, 13])
@pytest.mark.parametrize("rows", [3, 50, 161])
def test_logits_are_equal(model: Any, rows: int, pad: int) -> None:
    """Prompts shorter and much longer than index_topk=8, with and without left padding."""
    inputs = prompt(rows, min(pad, rows))
    expected = model(**inputs).logits
    with use_kpool(model):
        assert all(isinstance(m, KPoolTransformersIndexer) for m in indexers(model))
        assert torch.equal(model(**inputs).logits, expected)


@torch.no_grad()
def test_the_selection_decides_the_logits(model: Any) -> None:
    """Negative control: with another slot bias the logits differ, so equal logits above mean equal selections."""
    inputs = prompt(50, 3)
    expected = model(**inputs).logits
    with use_kpool(model):
        bias = indexers(model)[0].index_kpool_compress_ape
        kept = bias.detach().clone()
        bias.mul_(-1)
        changed = model(**inputs).logits
        bias.copy_(kept)
        assert not torch.allclose(changed, expected, atol=1e-4)
        assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="dynamic"),
        pytest.param({"num_beams": 3}, id="beams", marks=pytest.mark.slow),
        pytest.param({"cache_implementation": "static"}, id="static"),
        pytest.param({"use_cache": False}, id="uncached", marks=pytest.mark.slow),
    ],
)
def test_generation_is_equal_token_for_token(model: Any, options: dict[str, Any]) -> None:
    """A left-padded batch, with every kind of cache, beams that reorder it, and none."""
    inputs = prompt(40, 9)
    expected = generate(model, inputs, **options)
    with use_kpool(model):
        assert torch.equal(generate(model, inputs, **options), expected)


@torch.no_grad()
def test_cached_decode_step_by_step(model: Any) -> None:
    """Prefill in two pieces, then one and two tokens at a time: the logits of each call are the original's."""
    from transformers import DynamicCache

    inputs = prompt(48, 5)

    def run() -> list[Tensor]:
        cache = DynamicCache(config=model.config.text_config)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        logits, done = [], 0
        for step in (20, 15, 1, 1, 2, 1, 1, 1, 3, 3):
            out = model(
                input_ids=ids[:, done : done + step], attention_mask=mask[:, : done + step], cache=cache, use_cache=True
            )
            logits.append(out.logits)
            done += step
        return logits

    expected = run()
    with use_kpool(model):
        got = run()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
@pytest.mark.parametrize("change", ["reset", "crop", "reorder", "copy"])
def test_a_cache_changed_by_others_is_noticed(model: Any, change: str) -> None:
    """Pooled keys kept beside the cache are rebuilt when the cache is not as the last call left it."""
    from transformers import DynamicCache

    theirs = indexers(model)[0]
    ours = KPoolTransformersIndexer(theirs)
    generator = torch.Generator().manual_seed(4)

    def run(indexer: Any) -> Tensor:
        generator.manual_seed(4)
        cache = DynamicCache(config=theirs.config)
        for rows in (30, 1, 5, 1):
            if rows == 5:
                layer = cache.layers[theirs.layer_idx]
                if change == "reset":
                    layer.reset()
                elif change == "crop":
                    layer.crop(-3)
                elif change == "reorder":
                    layer.reorder_cache(torch.tensor([1, 1]))
                else:
                    cache = copy.deepcopy(cache)
            x = torch.randn(2, rows, 64, generator=generator)
            r = torch.randn(2, rows, 32, generator=generator)
            empty = torch.zeros(2, 1, rows, 4)
            cache.update(empty, empty, theirs.layer_idx)
            out = indexer(x, r, torch.ones(2, rows, dtype=torch.bool), cache)
        return out.sort(-1).values

    assert torch.equal(run(ours), run(theirs))


@torch.no_grad()
def test_decoding_extends_the_pooled_keys(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step pools its own token only; pooling everything again would cost O(T) a token."""
    taken: list[int] = []
    original = KPoolTransformersIndexer._append

    def count(self: Any, kept: Any, states: Tensor) -> Any:
        taken.append(states.shape[1])
        return original(self, kept, states)

    monkeypatch.setattr(KPoolTransformersIndexer, "_append", count)
    with use_kpool(model):
        generate(model, prompt(40), tokens=4)
    assert taken == [40] * 2 + [1] * 6


def test_restore_and_nesting(model: Any) -> None:
    before = indexers(model)
    handle = use_kpool(model)
    assert [m.layer_idx for m in indexers(model)] == [1, 3]
    with pytest.raises(ValueError, match="uses kpool already"):
        use_kpool(model)
    handle.restore()
    assert all(a is b for a, b in zip(indexers(model), before, strict=True))
    handle.restore()  # twice is no error
    with pytest.raises(RuntimeError, match="inside"), use_kpool(model):
        raise RuntimeError("inside")
    assert all(a is b for a, b in zip(indexers(model), before, strict=True))


def test_parameters_are_shared_not_copied(model: Any) -> None:
    names = dict(model.named_parameters())
    with use_kpool(model):
        now = dict(model.named_parameters())
        assert names.keys() == now.keys()
        assert all(now[name] is names[name] for name in names)


@torch.no_grad()
def test_a_copy_and_a_cast_of_the_model(model: Any) -> None:
    with use_kpool(model):
        twin = copy.deepcopy(model).to(torch.bfloat16)
    inputs = prompt(50, 3)
    got = twin(**inputs).logits
    plain = copy.deepcopy(model).to(torch.bfloat16)
    assert torch.equal(got, plain(**inputs).logits)


def test_a_model_without_indexers_is_refused() -> None:
    with pytest.raises(ValueError, match="got Linear without any"):
        use_kpool(torch.nn.Linear(2, 2))


@torch.no_grad()
@pytest.mark.parametrize("shard", ["50GB", "100KB"])
def test_saved_checkpoint_supplies_an_indexer(model: Any, tmp_path: Path, shard: str) -> None:
    """`save_pretrained`, in one file or many, then `KPoolIndexer.from_pretrained` of each indexer layer."""
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shard == "100KB")
    for theirs in indexers(model):
        ours = KPoolIndexer.from_pretrained(tmp_path, theirs.layer_idx, numerics="hf")
        assert ours.config.index_kpool == 4
        x, r = glm5.inputs(theirs.config, 2, 60, torch.float32, 1)
        mask = torch.ones(2, 60, dtype=torch.bool)
        assert torch.equal(ours(x, r).sort(-1).values, theirs(x, r, mask, None).sort(-1).values)
    with pytest.raises(ValueError, match="layer 2 has no indexer; layers that have one: 1, 3"):
        KPoolIndexer.from_pretrained(tmp_path, 2)
