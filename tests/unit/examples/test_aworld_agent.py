"""The AWorld example; tests/integration runs it."""

import ast
import io
import tokenize
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples/aworld_agent.py"
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def test_the_example_is_forty_lines_of_code_at_most() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            text = node.body[0]
            code.difference_update(range(text.lineno, (text.end_lineno or 0) + 1))
    assert len(code) <= 40
