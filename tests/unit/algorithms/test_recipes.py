"""Every recipe against the objective that its paper prints, from stored records to the gradient.

The objectives are written from the papers, one answer after the other, and differentiated by autograd.
Nothing of ours is in them but the values that the recipes set.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from harness.trees import NO_AUTOCAST, make_record, make_turn
from torch import Tensor, nn

from agentrl.config.command_line import parse_flags
from agentrl.config.loading import build_config
from agentrl.config.recipes import RECIPES, recipe_row
from agentrl.config.sections import AlgorithmSection
from agentrl.data import build_training_step, select_group
from agentrl.data.rows import PackedRow
from agentrl.models.policy import TargetLogprobs
from agentrl.trainer.learner.passes import forward_backward

ROOT = Path(__file__).parents[3]
LENGTHS = (7, 3, 11, 5, 4)


@dataclass(frozen=True)
class Answer:
    """One answer to a question: log pi, log mu and log pi_ref of its tokens, and its reward."""

    log_pi: Tensor
    log_mu: Tensor
    log_ref: Tensor
    reward: float

    @property
    def ratio(self) -> Tensor:
        return (self.log_pi - self.log_mu).exp()

    @property
    def size(self) -> int:
        return len(self.log_pi)


Question = list[Answer]


def questions() -> list[Question]:
    """Two questions whose answers differ in reward, one of them average, and one where none does."""
    rng = np.random.default_rng(5)
    rewards = [(1.0, 0.0, 0.5, 1.0, 0.0), (0.0, 1.0, 0.0, 0.0, 0.0), (1.0,) * 5]
    found = []
    for of_question in rewards:
        answers = []
        for size, reward in zip(LENGTHS, of_question, strict=True):
            # The store keeps float32.
            mu = rng.normal(-2.0, 0.5, size).astype(np.float32).astype(np.float64)
            log_pi = torch.from_numpy(mu + rng.normal(0.0, 0.5, size)).requires_grad_()
            log_ref = torch.from_numpy(mu + rng.normal(0.0, 0.5, size))
            answers.append(Answer(log_pi, torch.from_numpy(mu), log_ref, reward))
        found.append(answers)
    return found


def centered(question: Question) -> list[float]:
    mean = sum(one.reward for one in question) / len(question)
    return [one.reward - mean for one in question]


def standardized(question: Question) -> list[float]:
    values = centered(question)
    deviation = (sum(value**2 for value in values) / len(values)) ** 0.5
    return [value / deviation if deviation else 0.0 for value in values]


def surrogate(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A), as PPO and all of its heirs print it."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def mean_over_questions(per_question: Callable[[Question], Tensor], of: list[Question]) -> Tensor:
    return torch.stack([per_question(question) for question in of]).mean()


def grpo(of: list[Question]) -> Tensor:
    """2402.03300, eq. 3: 1/G sum_i 1/|o_i| sum_t (surrogate - beta KL), KL of eq. 4."""

    def one(question: Question) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for answer, advantage in zip(question, standardized(question), strict=True):
            gap = answer.log_ref - answer.log_pi
            kl = gap.exp() - gap - 1
            tokens = surrogate(answer.ratio, advantage, 0.2, 0.2) - 0.04 * kl
            total = total + tokens.sum() / answer.size
        return total / len(question)

    return mean_over_questions(one, of)


def dapo(of: list[Question]) -> Tensor:
    """2503.14476, eq. 8: 1/sum_i|o_i| sum_i sum_t surrogate(0.2, 0.28), all-equal groups left out."""
    total, size = torch.zeros((), dtype=torch.float64), 0
    for question in of:
        if len({answer.reward for answer in question}) == 1:
            continue  # eq. 11: 0 < number of right answers < G
        for answer, advantage in zip(question, standardized(question), strict=True):
            total = total + surrogate(answer.ratio, advantage, 0.2, 0.28).sum()
            size += answer.size
    return total / size


def dr_grpo(of: list[Question]) -> Tensor:
    """2503.20783, section 3.2: 1/G sum_i sum_t surrogate, A_i = R_i - mean(R)."""

    def one(question: Question) -> Tensor:
        parts = [
            surrogate(answer.ratio, advantage, 0.2, 0.2).sum()
            for answer, advantage in zip(question, centered(question), strict=True)
        ]
        return torch.stack(parts).sum() / len(question)

    return mean_over_questions(one, of)


def gspo(of: list[Question]) -> Tensor:
    """2507.18071, eq. 5 to 7: 1/G sum_i surrogate(s_i), s_i = (pi(y_i) / mu(y_i))^(1/|y_i|)."""

    def one(question: Question) -> Tensor:
        parts = []
        for answer, advantage in zip(question, standardized(question), strict=True):
            s = ((answer.log_pi - answer.log_mu).sum() / answer.size).exp()
            parts.append(surrogate(s, advantage, 3e-4, 4e-4))
        return torch.stack(parts).sum() / len(question)

    return mean_over_questions(one, of)


def cispo(of: list[Question]) -> Tensor:
    """2506.13585, eq. 4 and 5: 1/sum|o_i| sum sum sg(min(r, 5)) A log pi."""
    total, size = torch.zeros((), dtype=torch.float64), 0
    for question in of:
        for answer, advantage in zip(question, standardized(question), strict=True):
            weight = answer.ratio.detach().clamp(max=5.0)
            total = total + (weight * advantage * answer.log_pi).sum()
            size += answer.size
    return total / size


def minirl(of: list[Question]) -> Tensor:
    """2512.01374: sum_t M_t sg(min(r, 5)) A log pi; M_t = 0 where r left [0.8, 1.27] along A."""

    def one(question: Question) -> Tensor:
        parts = []
        for answer, advantage in zip(question, centered(question), strict=True):
            ratio = answer.ratio.detach()
            out = (ratio > 1.27) if advantage > 0 else (ratio < 0.8) & (advantage < 0)
            weight = ratio.clamp(max=5.0) * ~out
            parts.append((weight * advantage * answer.log_pi).sum())
        return torch.stack(parts).sum() / len(question)

    return mean_over_questions(one, of)


def rloo(of: list[Question]) -> Tensor:
    """2402.14740: 1/k sum_i (R_i - mean of the others) log pi(y_i)."""

    def one(question: Question) -> Tensor:
        total, k = torch.zeros((), dtype=torch.float64), len(question)
        for answer in question:
            others = (sum(other.reward for other in question) - answer.reward) / (k - 1)
            total = total + (answer.reward - others) * answer.log_pi.sum()
        return total / k

    return mean_over_questions(one, of)


def reinforce_pp(of: list[Question]) -> Tensor:
    """2501.03262, with baseline: group means off, mean and deviation of the batch's tokens out."""
    pairs = [
        (answer, value)
        for question in of
        for answer, value in zip(question, centered(question), strict=True)
    ]
    values = [value for answer, value in pairs for _ in range(answer.size)]
    tokens = torch.tensor(values, dtype=torch.float64)
    mean, deviation = tokens.mean(), tokens.std(correction=0)
    parts = [
        surrogate(answer.ratio, float((value - mean) / deviation), 0.2, 0.2).sum()
        for answer, value in pairs
    ]
    return torch.stack(parts).sum() / len(tokens)


OBJECTIVES = {
    one.__name__: one for one in (grpo, dapo, dr_grpo, gspo, cispo, minirl, rloo, reinforce_pp)
}


class Table(nn.Module):
    """A policy that knows the logprobs of its targets by heart."""

    def __init__(self, logprobs: Tensor) -> None:
        super().__init__()
        self.logprobs = nn.Parameter(logprobs.detach().clone())

    def forward(self, row: PackedRow, **_options: Any) -> TargetLogprobs:
        assert row.num_targets == len(self.logprobs)
        return TargetLogprobs(self.logprobs, None)


def trained(of: list[Question], algorithm: AlgorithmSection) -> tuple[float, dict[str, Tensor]]:
    """Our loss of the same answers, and its gradient by record."""
    by_record = {
        f"train/0/q{number}/{place}": answer
        for number, question in enumerate(of)
        for place, answer in enumerate(question)
    }
    groups = []
    for number, question in enumerate(of):
        task_id, records = f"train/0/q{number}", []
        for place, answer in enumerate(question):
            # Replies differ from their first token on, so no tree would share them.
            turn = make_turn(
                f"{task_id}/{place}",
                0,
                [1, 2, 3],
                [100 * number + 10 * place] * answer.size,
                logprobs=answer.log_mu.tolist(),
            )
            records.append(make_record([turn], answer.reward, task_id=task_id, traj_id=place))
        groups.append(select_group(records, algorithm, policy_version=0))
    batch = build_training_step(groups, algorithm, policy_version=0, token_budget=10**6)
    ((row,),) = batch.micro_batches
    starts = np.r_[True, row.records[1:] != row.records[:-1]]
    order = [batch.record_ids[index] for index in row.records[starts].tolist()]

    def table(values: Callable[[Answer], Tensor]) -> Table:
        return Table(torch.cat([values(by_record[name]) for name in order]))

    policy = table(lambda answer: answer.log_pi)
    done = forward_backward(
        policy,
        row,
        algorithm,
        chunk_size=10,
        autocast=NO_AUTOCAST,
        reference=table(lambda answer: answer.log_ref) if algorithm.kl_coefficient else None,
    )
    assert policy.logprobs.grad is not None
    sizes = [by_record[name].size for name in order]
    return done.loss, dict(zip(order, policy.logprobs.grad.split(sizes), strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_objective_of_its_paper(name: str) -> None:
    of = questions()
    loss, gradients = trained(of, parse_flags(["--recipe", name]).algorithm)
    objective = OBJECTIVES[name](of)
    objective.backward()
    assert loss == pytest.approx(-objective.item(), rel=1e-12)
    found, expected = [], []
    for number, question in enumerate(of):
        for place, answer in enumerate(question):
            assert answer.log_pi.grad is not None or name == "dapo"
            slope = answer.log_pi.grad
            expected.append(torch.zeros(answer.size) if slope is None else -slope)
            none = torch.zeros(answer.size, dtype=torch.float64)
            found.append(gradients.get(f"train/0/q{number}/{place}", none))
    difference = torch.cat(found) - torch.cat(expected)
    assert float(difference.norm() / torch.cat(expected).norm()) <= 1e-12


def test_answers_reach_every_branch_of_the_papers() -> None:
    pairs = [
        (float(ratio), advantage)
        for question in questions()
        for answer, advantage in zip(question, centered(question), strict=True)
        for ratio in answer.ratio.detach()
    ]
    for sign in (1, -1):
        ratios = [ratio for ratio, advantage in pairs if advantage * sign > 0]
        assert min(ratios) < 0.8
        assert max(ratios) > 1.28
    assert any(advantage == 0 for _, advantage in pairs)


@pytest.mark.parametrize("name", RECIPES)
def test_the_documentation_has_the_flags_that_the_recipe_stands_for(name: str) -> None:
    row = recipe_row(name)
    assert row in (ROOT / "docs" / "training.md").read_text().splitlines()
    values = yaml.safe_load("{" + row.split("`")[-2] + "}")
    assert build_config(values).algorithm == parse_flags(["--recipe", name]).algorithm
    assert name in (AlgorithmSection.model_fields["recipe"].description or "")


def test_every_row_of_corrections_in_the_documentation_is_taken(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    _, *rows = page.partition("| correction | flags |")[2].partition("\n\n")[0].split("\n| ")
    assert len(rows) > 5
    for row in rows:
        spans = row.replace("PATH", "/tmp/model").split("`")[1::2]
        advanced = [one.removeprefix("advanced: ") for one in spans if not one.startswith("--")]
        (tmp_path / "c.yaml").write_text(
            "\n  ".join(["advanced:", "{}" * (not advanced), *advanced])
        )
        flags = " ".join(one for one in spans if one.startswith("--")).split()
        parse_flags([*flags, "--config", str(tmp_path / "c.yaml")])
