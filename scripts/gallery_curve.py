"""Draws the mean reward of a run by step, from its database, as a picture for docs/gallery.md.

    .venv/bin/python scripts/gallery_curve.py MONGO_DIR RUN_NAME docs/images/gallery/NAME.svg

The run must have ended. All records that a step read count, including those of groups without
signal.
"""

import argparse
import asyncio
import statistics
from collections import defaultdict
from pathlib import Path

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

WIDTH, HEIGHT, MARGIN = 640, 220, 36
CONSUMER = "trainer"


async def rewards_by_step(uri: str, run: str) -> list[float]:
    """Return the mean score of the records that each step read."""
    scores: dict[int, list[float]] = defaultdict(list)
    async with TrajectoryStore.connect(uri, run) as store:
        for status in ("trained", "dropped"):
            async for data in store.ledger.find(status=status):
                step = data.ledger[CONSUMER].step
                if step is not None and data.score is not None:
                    scores[step].append(data.score.value)
    return [statistics.fmean(scores[step]) for step in sorted(scores)]


def picture(rewards: list[float], title: str) -> str:
    """Return the curve as SVG, on a scale from 0 to 1."""

    def place(step: int, reward: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / max(len(rewards) - 1, 1)
        return round(x, 1), round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * reward, 1)

    points = [place(step, reward) for step, reward in enumerate(rewards)]
    line = " ".join(f"{x},{y}" for x, y in points)
    grid = "".join(
        f'<path d="M{MARGIN} {y}H{WIDTH - MARGIN}" stroke="#8884"/>'
        f'<text x="{MARGIN - 6}" y="{y + 4}" text-anchor="end">{level:g}</text>'
        for level in (0, 0.5, 1)
        for y in [place(0, level)[1]]
    )
    marks = "".join(
        f"<circle cx='{x}' cy='{y}' r='2.5'><title>step {step}: {reward:.3f}</title></circle>"
        for step, ((x, y), reward) in enumerate(zip(points, rewards, strict=True), start=1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="#888"><title>{title}</title>{grid}'
        f'<polyline points="{line}" fill="none" stroke="#3f51b5" stroke-width="2"/>'
        f'<g fill="#3f51b5">{marks}</g>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 12}" text-anchor="end">'
        f"step {len(rewards)}</text>"
        f'<text x="{MARGIN}" y="{MARGIN - 14}">{title}</text></svg>\n'
    )


def main() -> None:
    """Read the run, and write its picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mongo", type=Path)
    parser.add_argument("run")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with EmbeddedMongo(args.mongo) as mongo:
        rewards = asyncio.run(rewards_by_step(mongo.uri(args.run), args.run))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    title = f"{args.out.stem}: mean reward by step, {rewards[0]:.2f} to {rewards[-1]:.2f}"
    args.out.write_text(picture(rewards, title), encoding="utf-8")
    print(" ".join(f"{reward:.2f}" for reward in rewards))


if __name__ == "__main__":
    main()
