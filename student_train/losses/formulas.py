"""Losses: pure functions of student outputs and teacher targets.

Each says its shapes and its normaliser. Shape letters: M masked tokens, G aligned runs, K kept
logits, V student vocabulary, D teacher width, B batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from student_train.data.targets import LogitTargets

OF_LOGITS = ("kl", "logit", "hard")  # over a vocabulary, or over the classes of a task
OF_TASK = ("ce", *OF_LOGITS, "log-odds")
OF_NORMALISED = ("hidden", "hidden-sum", "hidden-gelu", "hidden-kld")
OF_RAW = ("cosine", "contrastive")  # angles, which a norm per channel would turn
OF_RUNS = (*OF_NORMALISED, *OF_RAW)  # states of aligned runs
OF_SENTENCE = ("sentence", "sentence-kld")  # of the state of the first token
OF_HIDDEN = (*OF_RUNS, *OF_SENTENCE)
NAMES = ("mlm", *OF_TASK, *OF_HIDDEN, "attention")
CONTRASTED = 512  # runs of a batch that are told apart: the scores are their square
SHARPNESS = 20.0  # 1 / temperature of the cosines


def features_of(names: set[str], task: bool) -> list[str]:
    """The kinds of features of a store that losses read; of a `task` or of a vocabulary."""
    wanted = {
        "hidden": names & set(OF_HIDDEN),
        "logits": set() if task else names & set(OF_LOGITS),
        "task": names & set(OF_TASK) if task else set(),
        "attention": names & {"attention"},
    }
    return [kind for kind, readers in wanted.items() if readers]


def mlm(logits: Tensor, labels: Tensor) -> Tensor:
    """Masked-LM cross-entropy of logits [M,V] against labels [M], mean over M.

    (BERT: Devlin et al. 2019, section 3.1.) Zero, with a gradient, if nothing is masked.
    """
    if len(labels) == 0:
        return logits.sum() * 0.0
    return functional.cross_entropy(logits.float(), labels)


def kl(logits: Tensor, targets: LogitTargets, temperature: float) -> Tensor:
    """T^2 KL(teacher || student), mean over G, of logits [G,V] against kept log-probabilities [G,K]
    and their rest [G].

    Both sides are distributions over the same outcomes: the kept pieces and one more for all that
    is left over, so nothing is renormalised. The temperature softens these outcomes, p^(1/T), not
    the unseen single logits (Hinton et al. 2015, eq. 1-4; the left-over outcome is the "ghost
    token" of sparse distillation).
    """
    if len(logits) == 0:
        return logits.sum() * 0.0
    student = _outcomes(logits.float(), targets)
    teacher = torch.cat([targets.logprobs, targets.rest[:, None]], dim=1)
    log_p = functional.log_softmax(teacher / temperature, dim=1)
    log_q = functional.log_softmax(student / temperature, dim=1)
    p = log_p.exp()
    # Outcomes of probability zero add nothing; -inf - -inf must not become NaN.
    terms = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p))
    return terms.sum(dim=1).mean() * temperature**2


def _outcomes(logits: Tensor, targets: LogitTargets) -> Tensor:
    """Student log-probabilities [G,K+1] of the kept pieces and of everything else."""
    log_partition = logits.logsumexp(dim=1, keepdim=True)
    kept = logits.gather(1, targets.ids) - log_partition
    kept = kept.masked_fill(~targets.valid, -torch.inf)
    rest = logits.scatter(1, targets.ids, -torch.inf).logsumexp(dim=1, keepdim=True) - log_partition
    return torch.cat([kept, rest], dim=1)


def logit(logits: Tensor, targets: LogitTargets) -> Tensor:
    """Squared difference of student and teacher logits over the kept shared pieces, mean over them
    all.

    The teacher's logit is its log-probability plus its log-partition (Ba & Caruana 2014, eq. 1).
    """
    if not targets.valid.any():
        return logits.sum() * 0.0
    wanted = targets.logprobs + targets.log_partition[:, None]
    return functional.mse_loss(
        logits.float().gather(1, targets.ids)[targets.valid], wanted[targets.valid]
    )


def hard(logits: Tensor, targets: LogitTargets) -> Tensor:
    """Cross-entropy of logits [G,V] against the teacher's best shared piece, mean over the runs
    that have one."""
    best = targets.logprobs.masked_fill(~targets.valid, -torch.inf).argmax(dim=1, keepdim=True)
    has_one = targets.valid.any(dim=1)
    if not has_one.any():
        return logits.sum() * 0.0
    return functional.cross_entropy(
        logits.float()[has_one], targets.ids.gather(1, best)[has_one, 0]
    )


def hidden(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared error of projected student states [G,D] against the teacher's, mean over G and D.

    `teacher` is normalised per channel with the store's calibration, so that a few loud channels do
    not make the whole loss (Kolesnikova et al. 2022, MSE on averaged hidden states).
    """
    if len(student) == 0:
        return student.sum() * 0.0
    return functional.mse_loss(student.float(), teacher)


def hidden_sum(student: Tensor, teacher: Tensor) -> Tensor:
    """The same summed over D and averaged over G: its weight is D times as much of `hidden`.

    (The scripts of Kolesnikova et al. 2022 divide a sum by the number of aligned tokens.)
    """
    return hidden(student, teacher) * teacher.shape[1]


def hidden_gelu(student: Tensor, teacher: Tensor) -> Tensor:
    """`hidden` of GELU(student): Mukherjee & Awadallah 2020, section 3.2, give it beside
    `hidden_kld`."""
    return hidden(functional.gelu(student.float()), teacher)


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine of projected student states [G,D] and the teacher's raw states, mean over G.

    (DistilBERT: Sanh et al. 2019, section 3.)
    """
    if len(student) == 0:
        return student.sum() * 0.0
    return (1 - functional.cosine_similarity(student.float(), teacher, dim=1)).mean()


def hidden_kld(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(softmax teacher || softmax GELU(student)) over the channels of projected student states
    [G,D] and the teacher's, mean over G.

    (Mukherjee & Awadallah 2020, section 3.2: the projection ends in a GELU, and the divergence does
    not mind the scale.) `teacher` is normalised per channel, as for `hidden`: else a few loud
    channels would be the whole distribution.
    """
    if len(student) == 0:
        return student.sum() * 0.0
    log_q = functional.log_softmax(functional.gelu(student.float()), dim=1)
    log_p = functional.log_softmax(teacher, dim=1)
    return functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def contrastive(student: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy of telling each projected student state's own teacher state from those of the
    batch's other runs, by the cosine; states [G,D], mean over the first 512 of G.

    (InfoNCE: van den Oord et al. 2018, eq. 4; for distillation Tian et al. 2020.)
    """
    if len(student) == 0:
        return student.sum() * 0.0
    own = functional.normalize(student[:CONTRASTED].float(), dim=1)
    others = functional.normalize(teacher[:CONTRASTED], dim=1)
    return functional.cross_entropy(
        SHARPNESS * own @ others.T, torch.arange(len(own), device=own.device)
    )


def attention(student: Tensor, teacher: Tensor, pairs: Tensor) -> Tensor:
    """Squared error of attention probabilities between runs [B,G,G], mean over the entries where
    `pairs` [B,G,G].

    Probabilities, not scores (Kolesnikova et al. 2022; TinyBERT compares scores).
    """
    if not pairs.any():
        return student.sum() * 0.0
    return functional.mse_loss(student.float()[pairs], teacher[pairs])
