import ast
from pathlib import Path

import tensorforge
from tensorforge.launch.supervisor import stacks
from tensorforge.launch.supervisor.stacks import is_waiting_for_peers, script_stack

AT_WORK = """Stack (most recent call first):
  File "/job/train.py", line 9 in loss
  File "/job/train.py", line 20 in <module>
  File "/x/tensorforge/launch/processes/bootstrap.py", line 88 in _run_script
"""
WAITING = """Stack (most recent call first):
  File "/x/tensorforge/train/group/gloo_group.py", line 70 in wait
  File "/x/tensorforge/train/loop/run.py", line 99 in commit
  File "/job/train.py", line 21 in <module>
  File "/x/tensorforge/launch/processes/bootstrap.py", line 88 in _run_script
"""
IN_A_HOOK = """Stack (most recent call first):
  File "/x/lib/python3.11/site-packages/torch/nn/utils.py", line 7 in clip
  File "/job/train.py", line 9 in before_update
  File "/x/tensorforge/train/loop/run.py", line 99 in commit
  File "/job/train.py", line 21 in <module>
  File "/x/tensorforge/launch/processes/bootstrap.py", line 88 in _run_script
"""


def test_code_of_the_user_that_the_commit_calls_is_not_waiting():
    assert not is_waiting_for_peers(IN_A_HOOK)
    assert is_waiting_for_peers(WAITING)
    assert not is_waiting_for_peers("")


def test_the_functions_that_count_as_waiting_exist_in_the_training_code():
    folder = Path(tensorforge.__file__).parent / "train"
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    functions = {
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    assert functions >= stacks._WAITING


def test_of_a_dump_the_stack_of_the_script_is_shown():
    assert script_stack(AT_WORK).splitlines() == [
        "the script's stack (most recent call first):",
        '  File "/job/train.py", line 9 in loss',
        '  File "/job/train.py", line 20 in <module>',
    ]
    assert script_stack("what is\nthis") == "what is\nthis"
