"""Decode one token at a time from a key-value cache, with the log-normalizer at every step.

The cache is attended in two chunks and the new token separately; `merge` joins the three exactly.
Run it: python examples/decode_with_cache.py
"""

import torch

import cumulant as cm

HEADS, WIDTH, STEPS = 4, 32, 6


def main() -> None:
    torch.manual_seed(0)
    keys = torch.randn(HEADS, STEPS, WIDTH, dtype=torch.float64)
    values = torch.randn(HEADS, STEPS, WIDTH, dtype=torch.float64)
    queries = torch.randn(HEADS, STEPS, WIDTH, dtype=torch.float64)
    whole = cm.attend(queries, keys, values, is_causal=True)

    print("step   G of head 0   entropy   difference to full causal attention")
    for t in range(STEPS):
        query = queries[:, t : t + 1]
        half = t // 2
        parts = [(0, half), (half, t), (t, t + 1)]  # two chunks of the cache, the new token
        step = cm.attend(query, keys[:, :0], values[:, :0])
        for a, b in parts:
            step = cm.merge(step, cm.attend(query, keys[:, a:b], values[:, a:b]))
        error = (step.mean[:, 0] - whole.mean[:, t]).abs().max().item()
        g, h = step.log_normalizer[0, 0].item(), step.entropy[0, 0].item()
        print(f"{t:4d}   {g:11.4f}   {h:7.4f}   {error:.1e}")


if __name__ == "__main__":
    main()
