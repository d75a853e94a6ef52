"""Rules that users give for their own operators.

*Takes* an operator and its dimensions as letters. *Gives* a row in the table of rules.
"""

from __future__ import annotations

from koila._torch import OpOverload, schema_of
from koila.analysis.rules import RULES, rule_for
from koila.analysis.rules._rows import letters
from koila.errors import AnalysisError


def add_rule(target: OpOverload, dimensions: str) -> None:
    """Add a row for an operator; a later row replaces an earlier one."""
    if not isinstance(target, OpOverload):
        raise AnalysisError(
            f"a rule belongs to one overload of an operator, got {target!r}",
            hint='koila.rule(torch.ops.my_library.my_operator.default, "x=b_ -> b_")',
        )
    named = {word.partition("=")[0] for word in dimensions.partition("->")[0].split()}
    known = {argument.name for argument in schema_of(target).arguments}
    if "->" not in dimensions or not named <= known:
        raise AnalysisError(
            f"cannot read the rule {dimensions!r}: {target} has the arguments {', '.join(sorted(known))}",
            hint='one word per tensor argument, then the results: "x=bT w=TK -> bK"',
        )
    RULES[target] = letters(dimensions)
    rule_for.cache_clear()
