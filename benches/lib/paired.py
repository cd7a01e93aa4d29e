"""What paired measurements say about a difference, each with an interval that holds it in 95 of 100 cases.

The plain mean is what a long run pays, and one interruption by other work can move it. The other two say what a pair
costs that nothing interrupts.
"""

import math
import statistics

TRIMMED = 0.2


def student(degrees):
    """The 97.5 % quantile of Student's distribution (the first terms of Cornish and Fisher's expansion)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def mean(values):
    """(mean, low, high), by the normal approximation."""
    middle, n = statistics.fmean(values), len(values)
    half = student(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.inf
    return middle, middle - half, middle + half


def trimmed(values):
    """(mean without the lowest and the highest fifth, low, high), by Tukey and McLaughlin (Sankhya A 25, 1963): the
    variance is that of the values with each fifth replaced by its inner end."""
    ordered, n = sorted(values), len(values)
    cut = int(TRIMMED * n)
    kept = ordered[cut : n - cut]
    middle = statistics.fmean(kept)
    if len(kept) < 2:
        return middle, -math.inf, math.inf
    drawn_in = [kept[0]] * cut + kept + [kept[-1]] * cut
    half = student(len(kept) - 1) * statistics.stdev(drawn_in) / ((1 - 2 * TRIMMED) * math.sqrt(n))
    return middle, middle - half, middle + half


def median(values):
    """(median, low, high): the order statistics of the sign test (Conover, Practical Nonparametric Statistics, 3.2), which
    assume nothing about the distribution."""
    ordered, n = sorted(values), len(values)
    rank = int((n - 1.96 * math.sqrt(n)) / 2)
    low, high = (ordered[rank - 1], ordered[n - rank]) if rank >= 1 else (-math.inf, math.inf)
    return statistics.median(ordered), low, high
