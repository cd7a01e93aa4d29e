"""The checker is checked: each promise that is broken on purpose must be found. Run: python3 -m unittest discover tests/torch"""

import json
import os
import tempfile
import unittest

from events import CheckFailed, EventLog, check_all, check_nothing_lost


class Script:
    """Writes the events that a run would have written."""

    def __init__(self, directory):
        self.path = os.path.join(directory, "events.jsonl")
        self.now = 1000
        self.pid = 100

    def put(self, event, member, **fields):
        self.now += 1
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "t": self.now, "local_rank": 0, "restart": 0, **member, **fields}) + "\n")

    def group(self, nodes, resumed=0, port=1, ranks=None, steps=3):
        members = []
        for rank, node in zip(ranks or range(len(nodes)), nodes):
            self.pid += 1
            members.append({"pid": self.pid, "node": node, "rank": rank, "world": len(nodes)})
            self.put("start", members[-1], master=f"127.0.0.1:{port}")
        key = self.now
        for member in members:
            self.put("first_allreduce", member, group=key)
        for member in members:
            self.put("resumed", member, group=key, step=resumed)
        for step in range(resumed + 1, resumed + steps + 1):
            for member in members:
                self.put("step", member, group=key, step=step, loss=1.0)
        return key, members


class EventsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.script = Script(folder.name)
        self.log = EventLog(self.script.path)

    def broken(self, text):
        with self.assertRaisesRegex(CheckFailed, text):
            check_all(self.log)

    def test_a_good_run_passes(self):
        key, members = self.script.group(["a", "b", "c"])
        self.script.put("saved", members[0], group=key, step=3)
        lost_at = self.script.now
        self.script.group(["a", "b"], resumed=3, port=2)
        check_all(self.log)
        after = self.log.wait_group(world=2, after=lost_at, nodes=["a", "b"], timeout=0)
        self.assertEqual(after.last_start(), after.members[-1].start)
        check_nothing_lost(self.log, key, after)
        self.assertEqual(self.log.last_step(), 6)

    def test_an_empty_file_is_no_pass(self):
        self.broken("no group answered")

    def test_a_rank_given_twice(self):
        self.script.group(["a", "b", "c"], ranks=[0, 1, 1])
        self.broken("ranks \\[0, 1, 1\\]")

    def test_ranks_of_a_node_apart(self):
        self.script.group(["a", "b", "a"])
        self.broken("not contiguous")

    def test_an_old_checkpoint(self):
        key, members = self.script.group(["a", "b"])
        self.script.put("saved", members[0], group=key, step=3)
        self.script.group(["a", "b"], resumed=2, port=2)
        self.broken("step 3 was saved")

    def test_a_survivor_of_the_old_group(self):
        key, members = self.script.group(["a", "b", "c"])
        self.script.group(["a", "b"], port=2)
        self.script.put("step", members[2], group=key, step=4, loss=1.0)
        self.broken("rank 2 on c")

    def test_a_master_used_twice(self):
        self.script.group(["a", "b"])
        self.script.group(["a", "b"])
        self.broken("share the master")

    def test_a_lost_step_on_a_drain(self):
        key, _ = self.script.group(["a", "b", "c"])
        self.script.group(["a", "b"], resumed=2, port=2)
        after = self.log.wait_group(world=2, timeout=0)
        with self.assertRaisesRegex(CheckFailed, "finished step 3"):
            check_nothing_lost(self.log, key, after)

    def test_waiting_has_an_end_and_says_what_was_seen(self):
        self.script.group(["a", "b"])
        with self.assertRaisesRegex(CheckFailed, "no world of 3 within 0 s; 2 process starts, groups: world 2"):
            self.log.wait_group(world=3, timeout=0)

    def test_half_a_line_waits_for_its_rest(self):
        self.script.group(["a", "b"], steps=1)
        with open(self.script.path, encoding="utf-8") as file:
            whole = file.read()
        with open(self.script.path, "w", encoding="utf-8") as file:
            file.write(whole[:-20])
        seen = len(self.log.poll().events)
        with open(self.script.path, "a", encoding="utf-8") as file:
            file.write(whole[-20:])
        self.assertEqual(len(self.log.poll().events), seen + 1)


if __name__ == "__main__":
    unittest.main()
