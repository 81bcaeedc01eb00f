# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What ZFS says, as recorded in tests/fixtures/zfs, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import zfs
from ansible_collections.sparkwright.dsv41.plugins.module_utils.zfs import Choice, Receiver, Snapshot, Token

FIXTURES = Path(__file__).parents[3] / "fixtures/zfs"
SPARK = "tank/models"


def recorded(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


def ours(number: int, guid: int = 0, **more: int) -> Snapshot:
    return Snapshot(f"sparkwright-{number}", guid or number, number, **more)


def test_snapshots_of_one_dataset_with_holds_and_clones() -> None:
    first, second = zfs.parse_snapshots(recorded("list-snapshots-columns"), SPARK)
    assert first == Snapshot("v1", 8275135393878780944, 8, 1796268417, 1, "")
    assert (second.name, second.holds, second.clones) == ("sparkwright-20260102T030405Z", 0, "tank/clone")
    assert (first.ours, second.ours) == (False, True)
    (below,) = zfs.parse_snapshots(recorded("list-snapshots-columns"), "tank/models/below")
    assert below.name == "x"


@pytest.mark.parametrize("text", [recorded("list-snapshots-source"), "tank/models@a\tx\t1\t1\t0\t-\n"])
def test_other_columns_are_no_snapshots(text: str) -> None:
    with pytest.raises(zfs.ZfsError):
        zfs.parse_snapshots(text, SPARK)


@pytest.mark.parametrize(
    ("name", "size"),
    [("send-nvP-full", 50356464), ("send-nvP-incremental", 8398896), ("send-nvP-token", 30383536)],
)
def test_size_of_a_stream(name: str, size: int) -> None:
    assert zfs.parse_size(recorded(name)) == size


def test_what_a_token_holds() -> None:
    token = zfs.parse_token(recorded("send-nvP-token"))
    assert token == Token(SPARK, "v1", 1438945879183758666, 0, 0x130C340)
    assert token.received + zfs.parse_size(recorded("send-nvP-token")) == zfs.parse_size(recorded("send-nvP-full"))


def test_what_is_no_answer() -> None:
    for parse in (zfs.parse_size, zfs.parse_token, zfs.parse_properties):
        with pytest.raises(zfs.ZfsError):
            parse(recorded("get-no-dataset"))


@pytest.mark.parametrize(
    ("wanted", "lacking"),
    [
        ({"recordsize": "1M", "atime": "off"}, {}),
        ({"recordsize": "128K"}, {"recordsize": "128K"}),
        ({"compression": "lz4", "quota": "none"}, {"compression": "lz4"}),
        ({"nonsense": "on"}, {"nonsense": "on"}),
    ],
)
def test_properties_that_differ(wanted: dict[str, str], lacking: dict[str, str]) -> None:
    rows = [line.split("\t") for line in recorded("get-all-source").splitlines()]
    actual = zfs.parse_properties("".join(f"{row[1]}\t{row[2]}\n" for row in rows))
    assert zfs.differing(wanted, actual) == lacking


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("tank/models", True),
        ("tank", True),
        ("tank/a_b-c.d:e", True),
        ("", False),
        ("/tank", False),
        ("tank/", False),
        ("tank/../x", False),
        ("tank/a b", False),
        ("tank/a@b", False),
        ("-r", False),
        ("tank/ä", False),
    ],
)
def test_names_of_datasets(name: str, valid: bool) -> None:
    assert zfs.valid_dataset(name) is valid


def test_a_name_that_is_taken_is_not_given_again() -> None:
    first = zfs.new_name(0, [])
    assert first == "sparkwright-19700101T000000Z" and zfs.valid_snapshot(first)
    assert zfs.new_name(0, [first]) == "sparkwright-19700101T000001Z"


def test_only_ours_that_nobody_needs_go() -> None:
    held, cloned = ours(1, holds=1), Snapshot("sparkwright-2", 2, 2, clones="tank/clone")
    snapshots = [held, cloned, ours(3), Snapshot("by-hand", 4, 4), ours(5), ours(6)]
    assert zfs.doomed(snapshots, 1) == [ours(3), ours(5)]
    assert zfs.doomed(snapshots, 1, [3]) == [ours(5)]
    assert zfs.doomed(snapshots, 9) == []
    assert zfs.doomed(snapshots, 0) == zfs.doomed(snapshots, 1), "the newest one stays in any case"


def test_what_is_sent_builds_on_what_both_have_by_guid() -> None:
    source = [ours(1), Snapshot("by-hand", 2, 2), ours(3)]
    assert zfs.choose(source, []) == Choice(ours(3), None)
    assert zfs.choose(source, [Snapshot("another-name", 2, 9)]) == Choice(ours(3), source[1])
    assert zfs.choose(source, [ours(3, guid=77)]) == Choice(ours(3), None), "the same name says nothing"
    assert zfs.choose(source, [ours(3)], "sparkwright-1") == Choice(ours(1), None)
    assert zfs.choose(source[1:2], []) is None


def test_a_token_goes_on_while_the_source_has_what_it_names() -> None:
    source = [ours(1), ours(2), ours(3)]
    assert zfs.resumable(Token(SPARK, "sparkwright-2", 2, 1, 5), source, ours(3)) == ""
    assert "no longer has" in zfs.resumable(Token(SPARK, "sparkwright-9", 9, 0, 5), source, ours(3))
    assert "builds on" in zfs.resumable(Token(SPARK, "sparkwright-2", 2, 8, 5), source, ours(3))
    assert "newer than" in zfs.resumable(Token(SPARK, "sparkwright-3", 3, 0, 5), source, ours(2))


def test_plans_of_a_receiver() -> None:
    absent = Receiver(SPARK, False)
    assert zfs.plan(Choice(ours(1), None), absent, 0, 0, False, False).action == "full"
    empty = Receiver(SPARK, True, empty=True)
    assert zfs.plan(Choice(ours(1), None), empty, 0, 0, False, False).overwrite
    for here in (empty._replace(empty=None), empty._replace(empty=False), empty._replace(children=["tank/models/x"])):
        assert [each.id for each in zfs.plan(Choice(ours(1), None), here, 0, 0, True, True).problems] == ["zfs.foreign"]

    held = Receiver(SPARK, True, [ours(1)], empty=False)
    assert zfs.plan(Choice(ours(1), ours(1)), held, 0, 0, False, False).action == "nothing"
    increment = zfs.plan(Choice(ours(2), ours(1)), held, 0, 0, False, False)
    assert (increment.action, increment.rollback_to, increment.problems) == ("incremental", "", ())
    refused = zfs.plan(Choice(ours(2), ours(1)), held, 5, 5, False, False)
    assert [each.id for each in refused.problems] == ["zfs.modified"]
    forced = zfs.plan(Choice(ours(2), ours(1)), held, 5, 5, True, False)
    assert (forced.rollback_to, forced.problems) == ("sparkwright-1", ()) and "5 bytes" in forced.lost[0]
    newer = held._replace(snapshots=[ours(1), Snapshot("by-hand", 8, 8)])
    refused = zfs.plan(Choice(ours(2), ours(1)), newer, 5, 0, True, False)
    assert [each.id for each in refused.problems] == ["zfs.newer"] and "by-hand" in refused.problems[0].found


def test_room_is_the_stream_and_a_reserve() -> None:
    assert zfs.room(5000, 5100, SPARK) is None
    lacking = zfs.room(5000, 5099, SPARK)
    assert lacking and "1 bytes" in lacking.needed and "-r tank shows" in lacking.repair


def test_a_rollback_undoes_the_last_step() -> None:
    snapshots = [ours(1), ours(2), Snapshot("by-hand", 3, 3)]
    assert zfs.rollback(SPARK, snapshots, "", True)[:2] == (ours(1), snapshots[1:])
    assert zfs.rollback(SPARK, snapshots, "", True, dirty=True)[:2] == (ours(2), snapshots[2:])
    assert zfs.rollback(SPARK, snapshots, "by-hand", False) == (snapshots[2], [], ())
    (problem,) = zfs.rollback(SPARK, snapshots, "", False)[2]
    assert problem.id == "zfs.newer" and "sparkwright-2, by-hand" in problem.found
    for one in (zfs.rollback(SPARK, [ours(1)], "", True), zfs.rollback(SPARK, [], "", True, dirty=True)):
        assert one[0] is None and one[2][0].id == "zfs.snapshot"


@pytest.mark.parametrize(
    ("words", "text", "id_", "repair"),
    [
        (["zfs", "receive"], recorded("receive-wrong-base"), "zfs.command", "zfs receive"),
        (["zfs", "get"], "The ZFS modules cannot be auto-loaded.", "zfs.module", "modprobe zfs"),
        (["zfs", "receive"], "cannot receive: permission denied", "zfs.permission", "allow USER create,mount,receive"),
        (["zfs", "set"], "cannot set: permission denied", "zfs.permission", "the property's name"),
        (["zfs", "rollback"], "permission denied", "zfs.permission", "rollback,mount"),
    ],
)
def test_complaints_name_what_repairs_them(words: list[str], text: str, id_: str, repair: str) -> None:
    problem = zfs.complaint(words, 1, text)
    assert problem.id == id_ and repair in problem.repair and " ".join(text.split())[:20] in problem.found
