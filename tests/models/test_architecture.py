from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch

from metabridge import InputError
from metabridge.nas import CELLS, EDGES, OPERATORS, ActiveOperators, Architecture, random_architecture

CELL = (
    ((0, "sep_conv_3x3"), (1, "skip")),
    ((1, "conv_3x3"), (2, "max_pool_3x3")),
    ((0, "dil_conv_3x3"), (3, "conv_1x5_5x1")),
)


def random_architectures(count: int, seed: int = 0) -> list[Architecture]:
    generator = torch.Generator().manual_seed(seed)
    return [random_architecture(generator) for _ in range(count)]


def test_every_node_has_an_edge_from_every_earlier_source_and_there_are_seven_operators():
    assert EDGES == ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3))
    assert len(set(OPERATORS)) == 7


def test_an_architecture_is_unchanged_after_json_and_a_file(tmp_path):
    for architecture in random_architectures(20):
        assert Architecture.from_json(architecture.to_json()) == architecture
        assert Architecture.load(architecture.save(tmp_path / "architecture.json")) == architecture
    data = json.loads(Architecture(CELL, CELL).to_json())
    assert data["normal"][0] == [[0, "sep_conv_3x3"], [1, "skip"]]
    assert list(data) == list(CELLS)


def test_an_architecture_prints_each_node_as_a_sum():
    lines = str(Architecture(CELL, CELL)).splitlines()
    assert len(lines) == 6
    assert lines[1].split() == ["1:", "conv_3x3(c_{k-1})", "+", "max_pool_3x3(0)"]
    assert lines[5].split() == ["2:", "dil_conv_3x3(c_{k-2})", "+", "conv_1x5_5x1(1)"]


def with_node(node: int, pairs: object) -> dict[str, object]:
    """Return the data of an architecture in which the pairs of one node are replaced."""
    cell: list[object] = [list(pairs) for pairs in CELL]
    cell[node] = pairs
    return {"normal": cell, "reduction": CELL}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "an architecture must be an object with the keys 'normal' and 'reduction', but is a list."),
        (
            {"normal": CELL},
            "an architecture must have the keys 'normal' and 'reduction' and no others, but has 'normal'.",
        ),
        ({"normal": CELL[:2], "reduction": CELL}, "the normal cell has 2 nodes, but must have 3."),
        ({"normal": 5, "reduction": CELL}, "the normal cell must be a list of 3 nodes, each a list of 2 pairs"),
        (with_node(1, [["skip"], [0, "skip"]]), "the normal cell must be a list of 3 nodes, each a list of 2 pairs"),
        (with_node(0, [[0, "skip"]]), "node 0 of the normal cell has the sources [0], but must have 2 of [0, 1]."),
        (with_node(1, [[0, "skip"], [3, "skip"]]), "node 1 of the normal cell has the sources [0, 3], but must have 2"),
        (with_node(1, [[0, "skip"], [True, "skip"]]), "node 1 of the normal cell has the sources [0, True], but must"),
        (with_node(2, [[1, "skip"], [1, "skip"]]), "node 2 of the normal cell has the sources [1, 1], but they must"),
        (with_node(2, [[1, "skip"], [0, "skip"]]), "node 2 of the normal cell has the sources [1, 0], but they must"),
        (with_node(2, [[0, "skip"], [1, "conv_9x9"]]), "operator 'conv_9x9' is unknown. Use one of max_pool"),
        (with_node(2, [[0, "skip"], [1, ["skip"]]]), "operator ['skip'] is unknown. Use one of max_pool"),
    ],
)
def test_data_that_is_not_an_architecture_raises_an_input_error(data, message):
    with pytest.raises(InputError) as caught:
        Architecture.from_json(json.dumps(data))
    assert str(caught.value).startswith(message)


def test_the_error_for_a_file_without_an_architecture_names_the_file(tmp_path):
    with pytest.raises(InputError, match=r"the architecture .*none.json cannot be read \(No such file"):
        Architecture.load(tmp_path / "none.json")
    file = tmp_path / "bad.json"
    for content in (b"{", b"\xff\xfe\xfa"):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"bad.json does not contain an architecture: "):
            Architecture.load(file)


def test_without_removes_an_operator_from_one_edge_only():
    full = ActiveOperators.full()
    reduced = full.without(("reduction", 4, "skip"))
    assert set(full) - set(reduced) == {("reduction", 4, "skip")}
    assert len(list(full)) == 2 * 9 * 7
    assert list(reduced) == [operator for operator in full if operator != ("reduction", 4, "skip")]
    with pytest.raises(InputError, match="'skip' is not active on edge 4 of the reduction cell"):
        reduced.without(("reduction", 4, "skip"))
    with pytest.raises(InputError, match="'skip' is not active on edge 9 of the normal cell"):
        full.without(("normal", 9, "skip"))


def test_at_most_one_per_edge_is_true_when_all_edges_have_one_operator():
    active = ActiveOperators.full()
    for kind, edge, operator in list(active):
        if operator != OPERATORS[edge % 7]:  # the one operator that stays active on this edge
            assert not active.at_most_one_per_edge
            active = active.without((kind, edge, operator))
    assert active.at_most_one_per_edge
    assert [set(operators) for operators in active.normal] == [{OPERATORS[edge % 7]} for edge in range(9)]


def test_active_operators_of_an_impossible_network_raise_an_input_error():
    edges = ActiveOperators.full().normal
    with pytest.raises(InputError, match="the normal cell has 8 edges, but must have 9"):
        ActiveOperators(edges[:8], edges)
    with pytest.raises(InputError, match="operator 'conv_9x9' is unknown"):
        ActiveOperators((frozenset({"conv_9x9"}), *edges[1:]), edges)
    with pytest.raises(InputError, match="no operator is active on any edge of node 0 of the reduction cell"):
        ActiveOperators(edges, (frozenset(), frozenset(), *edges[2:]))


def test_the_best_architecture_has_the_best_operator_of_the_two_best_edges():
    """Node 1 has the edges 2, 3 and 4, and node 2 the edges 5 to 8."""
    scores = dict.fromkeys(ActiveOperators.full(), 0.0)
    # scores of the normal cell; on edge 1, all scores are equal, because -0.0 == 0.0
    new_scores = {(0, "skip"): 2.0, (1, "conv_3x3"): -0.0, (2, "skip"): 1.0, (4, "conv_3x3"): 3.0}
    new_scores |= {(6, "dil_conv_3x3"): 1.0, (5, "skip"): math.inf}
    scores |= {("normal", edge, operator): score for (edge, operator), score in new_scores.items()}
    scores["normal", 3, "skip"] = 0.5  # only the third-best edge of its node
    architecture = ActiveOperators.full().best_architecture(scores)
    first_operator = OPERATORS[0]  # wins if all scores are equal
    assert architecture.normal == (
        ((0, "skip"), (1, first_operator)),
        ((0, "skip"), (2, "conv_3x3")),
        ((0, "skip"), (1, "dil_conv_3x3")),
    )
    assert architecture.reduction == (((0, first_operator), (1, first_operator)),) * 3


def test_an_inactive_operator_is_not_selected_even_with_the_best_score():
    full = ActiveOperators.full()
    scores = {(kind, edge, operator): float(operator == "skip") for kind, edge, operator in full}
    without_a_skip = full.without(("normal", 0, "skip"))
    assert without_a_skip.best_architecture(scores).normal[0] == ((0, OPERATORS[0]), (1, "skip"))


def test_the_active_operators_of_an_architecture_give_the_same_architecture():
    for architecture in random_architectures(20):
        active = architecture.active_operators
        assert active.at_most_one_per_edge
        assert len(list(active)) == 12  # two cells of three nodes with two operators each
        assert active.best_architecture(dict.fromkeys(active, 0.0)) == architecture


@pytest.mark.parametrize("score", [None, math.nan])
def test_an_operator_without_a_score_raises_an_input_error(score):
    scores = dict.fromkeys(ActiveOperators.full(), 1.0)
    scores["reduction", 8, "skip"] = score
    if score is None:
        del scores["reduction", 8, "skip"]
    with pytest.raises(InputError, match="scores has no number for 'skip' on edge 8 of the reduction cell"):
        ActiveOperators.full().best_architecture(scores)


def test_random_architectures_use_all_operators_and_sources_equally_often():
    assert random_architectures(3, seed=5) == random_architectures(3, seed=5)
    pairs_of_nodes = [
        (kind, node, pair)
        for architecture in random_architectures(700)
        for kind in CELLS
        for node in (0, 1, 2)
        for pair in getattr(architecture, kind)[node]
    ]
    operators = Counter(operator for _, _, (_, operator) in pairs_of_nodes)
    # 700 architectures choose 12 times among seven operators: each 1200 times on average, with standard deviation 32
    assert all(abs(operators[name] / 1200 - 1) < 0.12 for name in OPERATORS)
    sources = Counter(source for kind, node, (source, _) in pairs_of_nodes if node == 2 and kind == "normal")
    # 700 architectures choose two of four sources: each 350 times on average, with standard deviation 13
    assert all(abs(sources[source] / 350 - 1) < 0.2 for source in range(4))
