"""The error tree: complete in its own description, and able to cross processes."""

import inspect
import pickle

import pytest

from agentrl import errors

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_stands_in_the_tree_and_survives_pickling(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.AgentRLError)
    assert f" {cls.__name__} " in f" {errors.__doc__} ".replace("\n", " ")
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if cls.__init__ is Exception.__init__:
        error = cls("what is wrong")
    else:
        given = {
            one: 418 if "int" in str(one.annotation) else "what is wrong" for one in parameters
        }
        named = {one.name: value for one, value in given.items() if one.kind is one.KEYWORD_ONLY}
        error = cls(*list(given.values())[: len(given) - len(named)], **named)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (cls, str(error), vars(error))
