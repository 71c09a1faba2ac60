"""word2vec on Jane Austen's novels: skip-gram with negative sampling (Mikolov et al., 2013).

Words with similar contexts get similar vectors: weekdays find weekdays, sisters brothers. The
script also tests the theory of negative sampling: at the optimum the inner product of a word and a
context, plus log k, is log p(context | word) / proposal(context) (Levy and Goldberg, 2014; T24), as
closely as vectors of 64 numbers can follow. It counts the pairs that were trained on.
Run it: python examples/word2vec.py (about a minute)
"""

import lzma
import math
import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

import cumulant as cm

TEXT = Path(__file__).parent / "data" / "austen.txt.xz"
LEAST, WINDOW, WIDTH, NEGATIVES, FREQUENT = 10, 5, 64, 5, 3e-4
EPOCHS, BATCH, RATE = 3, 4096, 0.01
WORDS = ["monday", "dinner", "london", "sister", "carriage", "three", "happy", "captain"]
GROUPS = {
    "weekdays": "monday tuesday wednesday thursday friday saturday sunday",
    "numbers": "two three four five six seven eight nine ten twelve twenty thirty fifty hundred",
    "family": "father mother brother sister son daughter wife husband uncle aunt cousin niece",
}


def read() -> tuple[list[str], Tensor, Tensor, Tensor]:
    """Words seen often enough, their counts, and the text as numbers with each one's paragraph."""
    with lzma.open(TEXT, "rt") as file:
        text = [re.findall(r"[a-z]+", line.lower()) for line in file]
    counts = Counter(word for line in text for word in line)
    words = [word for word, n in counts.most_common() if n >= LEAST]
    number = {word: i for i, word in enumerate(words)}
    found = [(number[word], i) for i, line in enumerate(text) for word in line if word in number]
    token, paragraph = torch.tensor(found).unbind(-1)
    return words, token.bincount(minlength=len(words)), token, paragraph


def pairs(token: Tensor, paragraph: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """One pass over the text: (word, context) in random order, frequent words thinned out."""
    chosen = torch.rand(len(token)) < keep[token]
    token, paragraph = token[chosen], paragraph[chosen]
    reach = torch.randint(1, WINDOW + 1, token.shape)
    word, context = list[Tensor](), list[Tensor]()
    for step in range(1, WINDOW + 1):
        same = paragraph[step:] == paragraph[:-step]
        before, after = token[:-step], token[step:]
        for a, b, far in ((before, after, reach[:-step]), (after, before, reach[step:])):
            near = same & (far >= step)
            word.append(a[near])
            context.append(b[near])
    order = torch.randperm(sum(len(x) for x in word))
    return torch.cat(word)[order], torch.cat(context)[order]


def train(
    token: Tensor, paragraph: Tensor, sampler: cm.contrastive.AliasSampler, keep: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors of words and of contexts, and how often each pair was seen."""
    n = len(keep)
    word = torch.nn.Embedding(n, WIDTH)
    context = torch.nn.Parameter(torch.zeros(n, WIDTH))
    torch.nn.init.uniform_(word.weight, -0.5 / WIDTH, 0.5 / WIDTH)
    optimizer = torch.optim.Adam([word.weight, context], RATE)
    seen = torch.zeros(n * n, dtype=torch.long)
    for epoch in range(EPOCHS):
        first, second = pairs(token, paragraph, keep)
        seen += torch.bincount(first * n + second, minlength=n * n)
        batches = list(zip(first.split(BATCH), second.split(BATCH), strict=True))
        mean = 0.0
        for i, (a, b) in enumerate(batches):
            optimizer.param_groups[0]["lr"] = RATE * (1 - (epoch + i / len(batches)) / EPOCHS)
            loss = cm.contrastive.negative_sampling(word(a), context, b, sampler, NEGATIVES).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean += loss.item() / len(batches)
        print(f"pass {epoch + 1} over the text: {len(first)} pairs, loss {mean:.3f}")
    return word.weight.detach(), context.detach(), seen.view(n, n)


def neighbours(vectors: Tensor, chosen: list[int], count: int) -> Tensor:
    """The words of the largest cosine, ``(chosen, count)``, without the word itself."""
    unit = torch.nn.functional.normalize(vectors)
    cosine = unit[chosen] @ unit.T
    cosine[range(len(chosen)), chosen] = -2.0
    return cosine.topk(count).indices


def compare(score: Tensor, seen: Tensor, log_proposal: Tensor, least: int) -> None:
    """<word, context> + log k against log p(context | word) / proposal(context)."""
    row, column = (seen >= least).nonzero(as_tuple=True)
    counted = (seen[row, column] / seen.sum(-1)[row]).log() - log_proposal[column]
    learned = score[row, column] + math.log(NEGATIVES)
    r = float(torch.corrcoef(torch.stack([learned, counted]))[0, 1])
    gap = learned - counted
    print(f"  {len(row)} pairs seen {least} times or more: correlation {r:.3f}, learned - counted")
    print(
        f"    {gap.mean():+.2f} +- {gap.std():.2f}; counted alone varies by +- {counted.std():.2f}"
    )


def main() -> None:
    torch.manual_seed(0)
    words, counts, token, paragraph = read()
    print(f"{len(token)} words of text, {len(words)} different ones seen at least {LEAST} times")
    share = counts / counts.sum()
    keep = (FREQUENT / share).sqrt().clamp(max=1.0)  # of frequent words only a part is used
    sampler = cm.contrastive.AliasSampler(counts.float() ** 0.75)
    word, context, seen = train(token, paragraph, sampler, keep)

    number = {name: i for i, name in enumerate(words)}
    print("nearest words")
    near = neighbours(word, [number[name] for name in WORDS], 6).tolist()
    for name, row in zip(WORDS, near, strict=True):
        print(f"  {name:>8}: {' '.join(words[i] for i in row)}")
    print("of the 5 nearest words so many are in the same group")
    for name, group in GROUPS.items():
        members = [number[member] for member in group.split()]
        found = torch.isin(neighbours(word, members, 5), torch.tensor(members)).double().mean()
        chance = (len(members) - 1) / (len(words) - 1)
        print(f"  {name:>8}: {found:.0%}, by chance {chance:.1%}")
    print("learned <word, context> + log k, counted log p(context | word) / proposal(context)")
    for least in (20, 100):
        compare(word @ context.T, seen, sampler.log_probability, least)


if __name__ == "__main__":
    main()
