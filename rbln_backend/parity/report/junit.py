"""The report for CI: one test case per prompt, and one for the layers."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from rbln_backend.parity.run import Outcome


def junit_report(outcome: Outcome) -> str:
    """Return the XML that CI systems read."""
    suite = ElementTree.Element("testsuite", name="rbln-parity")
    failed = 0
    for index, prompt in enumerate(outcome.options.prompts):
        reasons = [str(failure) for failure in outcome.failures if failure.prompt == index]
        failed += _case(suite, f"prompt {index}: {prompt}", reasons)
    found = outcome.bisection
    if found is not None:
        failed += _case(suite, "layers", [str(found.departure)] if found.departure else [])
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(failed))
    seconds = sum(result.seconds for result in outcome.results.values())
    suite.set("time", f"{seconds:.3f}")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, name: str, reasons: list[str]) -> int:
    case = ElementTree.SubElement(suite, "testcase", classname="rbln-parity", name=_printable(name))
    if reasons:
        failure = ElementTree.SubElement(case, "failure", message=_printable(reasons[0]))
        failure.text = _printable("\n".join(reasons))
    return bool(reasons)


def _printable(text: str) -> str:
    """XML 1.0 has no control characters."""
    return "".join(char if char.isprintable() or char in "\t\n" else "?" for char in text)
