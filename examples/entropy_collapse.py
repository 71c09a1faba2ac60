"""One small GPT-2 trained twice; at a large learning rate attention collapses, and an alarm rings.

The texts are random words whose second half repeats the first, so that attention has something to
learn. There is no QK-norm. At 0.003 training goes well; at 0.1 the scores grow within a few steps,
every query of the first layer looks at one key, and the loss stays where it was. The monitor
measures every 20th step.
Run it: python examples/entropy_collapse.py [picture.png] (needs transformers; matplotlib to draw)
"""

import sys
import warnings

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import cumulant as cm

WORDS, HALF, BATCH, STEPS = 16, 12, 16, 301
RATES = (0.003, 0.1)


def trained(rate: float) -> cm.lens.Monitor:
    """The monitor of a training run with Adam at this rate."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=2 * HALF,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    config.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with cm.lens.Monitor(model, every=20) as monitor:
        for _ in range(STEPS):
            half = torch.randint(0, WORDS, (BATCH, HALF))
            ids = torch.cat([half, half], 1)
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def draw(monitors: dict[float, cm.lens.Monitor], path: str) -> None:
    """Entropy, largest score and loss of the runs, with the thresholds."""
    from cumulant import figures

    limits = cm.lens.Thresholds()
    with figures.style():
        figure = figures.new_figure(9.5, 3.1)
        entropy, score, loss = figure.subplots(1, 3)
        for i, (rate, monitor) in enumerate(monitors.items()):
            color = figures.series_color(i)
            layers = monitor.table().groupby(["step", "layer"])
            shares = layers["entropy_share"].mean().unstack()
            scores = layers["score_max"].max().unstack()
            for axes, lines in ((entropy, shares), (score, scores)):
                for layer, kind in zip(lines, ("-", ":"), strict=True):
                    axes.plot(lines.index, lines[layer], kind, color=color)
            losses = layers["loss"].first().unstack()[0]
            loss.plot(losses.index, losses, color=color, label=f"learning rate {rate:g}")
        for axes, line in ((entropy, limits.entropy), (score, limits.logits)):
            axes.axhline(line, color=figures.MUTED, lw=1, ls="--")
        score.set_yscale("log")
        entropy.set_title("Entropy, share of uniform")
        score.set_title("Largest score")
        loss.set_title("Loss")
        loss.legend()
        for axes in (entropy, score, loss):
            axes.set_xlabel("step")
    figures.write(figure, path)


def main() -> None:
    monitors: dict[float, cm.lens.Monitor] = {}
    for rate in RATES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cm.lens.AttentionAlarm)  # printed below
            monitors[rate] = monitor = trained(rate)
        last = monitor.log.steps[-1]
        print(f"learning rate {rate:g}: loss {last.loss:.2f} at step {last.step}")
        for message in [alarm.message for alarm in monitor.alarms] or ["no alarm"]:
            print(f"  {message}")
    if len(sys.argv) > 1:
        draw(monitors, sys.argv[1])


if __name__ == "__main__":
    main()
