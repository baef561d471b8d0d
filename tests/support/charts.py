"""Read what a chart drew."""

import re
from xml.etree import ElementTree


def parse(figure, index=0):
    return ElementTree.fromstring(f"<svg>{figure.panels[index].content}</svg>")


def of_class(figure, name):
    return [element for element in parse(figure).iter() if name in (element.get("class") or "").split()]


def numbers(element):
    return [float(value) for value in re.findall(r"-?\d+\.?\d*", element.get("d"))]


def texts(figure):
    return [element.text for element in parse(figure).iter("text")]


def cells(figure):
    return [(row.label, *row.cells) for row in figure.numbers.rows]
