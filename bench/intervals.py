"""Sets of time intervals, for reading profiles.  A span is (start, end) with start <= end, in any one unit."""

Span = tuple[float, float]
Spans = list[Span]


def union(spans: Spans) -> Spans:
    """The same points as disjoint spans in order; spans that touch become one."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: Spans) -> float:
    """Of the union: time that several spans share counts once."""
    return sum(end - start for start, end in union(spans))


def intersection(a: Spans, b: Spans) -> Spans:
    """What lies in both, as disjoint spans in order."""
    a, b = union(a), union(b)
    common: Spans = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def exposed(spans: Spans, hiding: Spans) -> float:
    """Length of what lies in `spans` and in no span of `hiding`."""
    return length(spans) - length(intersection(spans, hiding))
