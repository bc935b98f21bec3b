"""Save one real indexer call of a small GLM-5.3-Flash model, to replay with `kpool verify --input`.

    python examples/capture_glm5_next.py [TEXT-FILE] [--out call.safetensors] [--tokens 4096] [--dtype bfloat16]

Builds a `glm5_next` text model of two layers with random weights from a seed (nothing is downloaded), with the index
geometry as released (H=32, D=128, P=4, K=2048), runs the text through it, byte by byte as token ids, and saves what the
second layer's indexer was given. Point `kpool.capture` at an indexer of your own training run for the same file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

import kpool

README = Path(__file__).resolve().parent.parent / "README.md"


def build_model(seed: int, dtype: torch.dtype) -> Glm5NextTextModel:
    """A text model of two sparse-attention layers: small everywhere but in the indexer."""
    torch.manual_seed(seed)
    config = Glm5NextTextConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        layer_types=["indexed_attention"] * 2,
        mlp_layer_types=["dense"] * 2,
        index_n_heads=32,
        index_head_dim=128,
        index_kpool=4,
        index_topk=2048,
        pad_token_id=None,
    )
    model = Glm5NextTextModel(config).to(dtype).eval()
    for layer in model.layers:  # zeros at initialisation, which would make every pool a plain mean
        torch.nn.init.normal_(layer.self_attn.indexer.index_kpool_compress_gate, std=0.05)
        torch.nn.init.normal_(layer.self_attn.indexer.index_kpool_compress_ape, std=0.5)
    return model


def main() -> None:
    """Read the text, run the model, save the call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, default=README, help="file whose bytes are the tokens")
    parser.add_argument("--out", type=Path, default=Path("call.safetensors"))
    parser.add_argument("--tokens", type=int, default=4096, help="use at most this many bytes")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    ids = torch.tensor([list(args.text.read_bytes()[: args.tokens])])
    model = build_model(args.seed, getattr(torch, args.dtype))
    indexer = model.layers[1].self_attn.indexer
    with torch.no_grad(), kpool.capture(indexer, args.out, model="glm5_next, random weights", text=args.text.name):
        model(input_ids=ids, use_cache=False)
    print(f"{args.out}: {ids.shape[1]} tokens of {args.text.name}, {args.out.stat().st_size / 2**20:.1f} MiB")
    print(f"now: kpool verify --input {args.out}")


if __name__ == "__main__":
    main()
