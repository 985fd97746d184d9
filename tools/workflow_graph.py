"""A ComfyUI graph described once, written both as the UI's workflow file and in the API's format.

Which inputs a node has, in which order, and which of them are widgets is read from the live node list (/object_info), so
that neither file can disagree with the nodes or with the other file.
"""

from __future__ import annotations

import math
import re
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field

WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
SEEDS = ("seed", "noise_seed")  # the frontend gives these a widget of their own: what happens to the seed after a run
BYPASS = 4  # LiteGraph's node mode
TITLE, SLOT, WIDGET, PADDING, GAP = 30, 20, 24, 20, 60  # pixels in the editor
NOTE_COLORS = {"color": "#432", "bgcolor": "#653"}
OUTPUT_NODES = {"PreviewImage": 260, "SaveImage": 260, "PreviewAny": 280, "TTTCompare": 480, "TTTCalibrate": 320, "TTTFineTune": 320, "TTTInspect": 420, "LoadImage": 220}
REPORTS = {"TTTLinearize", "TTTLoadModel", "TTTLoadWeights", "TTTSaveWeights"}  # show text below their widgets


@dataclass
class Node:
    """One node; node["MODEL"] is a link from its output of that name."""

    number: int
    kind: str
    info: dict
    values: dict
    title: str
    bypassed: bool = False
    width: int = 340
    extra: int = 0  # pixels of height beyond slots and widgets
    place: tuple[int, int] = (0, 0)

    def __getitem__(self, output: str) -> tuple[Node, int]:
        return self, self.info["output_name"].index(output)

    @property
    def inputs(self) -> list[tuple[str, list]]:
        """(name, definition) in the order of the node list."""
        groups = self.info["input"]
        return [(n, groups[g][n]) for g in ("required", "optional") for n in self.info["input_order"].get(g, []) if n in groups.get(g, {})]

    @property
    def widgets(self) -> list[tuple[str, list]]:
        return [(n, d) for n, d in self.inputs if is_widget(d)]

    @property
    def height(self) -> int:
        sockets = sum(not is_widget(d) for _, d in self.inputs)
        rows = len(self.widgets) + sum(has_control(n, d) for n, d in self.widgets)
        texts = sum(120 for _, d in self.widgets if options(d).get("multiline"))
        return TITLE + SLOT * max(sockets, len(self.info["output"])) + WIDGET * rows + texts + self.extra + 16


def options(definition: list) -> dict:
    return definition[1] if len(definition) > 1 else {}


def type_of(definition: list) -> str:
    return "COMBO" if isinstance(definition[0], list) else definition[0]


def is_widget(definition: list) -> bool:
    return type_of(definition) in WIDGETS and not options(definition).get("forceInput")


def has_control(name: str, definition: list) -> bool:
    asked = options(definition).get("control_after_generate")
    return type_of(definition) == "INT" and (asked if asked is not None else name in SEEDS)


def default(name: str, definition: list):
    if "default" in options(definition):
        return options(definition)["default"]
    choices = definition[0] if isinstance(definition[0], list) else options(definition).get("options", [])
    if type_of(definition) == "STRING":
        return ""
    if not choices:
        raise ValueError(f"{name} has no default; give it a value")
    return choices[0]


@dataclass
class Note:
    text: str
    width: int
    height: int
    place: tuple[int, int] = (0, 0)


@dataclass
class Group:
    title: str
    column: int
    width: int
    color: str
    items: list = field(default_factory=list)

    @property
    def height(self) -> int:
        return 2 * PADDING + TITLE + sum(i.height + PADDING + (TITLE if isinstance(i, Note) else 0) for i in self.items)


class Graph:
    """Nodes are added inside `with graph.group(...)`; each group stands in a column, below the groups added there before."""

    def __init__(self, name: str, node_list: dict):
        self.name, self.node_list = name, node_list
        self.groups: list[Group] = []
        self.nodes: list[Node] = []

    @contextmanager
    def group(self, title: str, column: int, width: int = 340, color: str = "#5fb0e5"):
        self.groups.append(Group(title, column, width, color))
        yield

    def add(self, kind: str, title: str = "", bypassed: bool = False, extra: int | None = None, **values) -> Node:
        """A node of this class; values: {input: value or link}. What is not given takes the node's default, sockets stay open."""
        info = self.node_list[kind]
        if extra is None:
            extra = OUTPUT_NODES.get(kind, 170 if kind in REPORTS else 0)
        node = Node(len(self.nodes) + 1, kind, info, dict(values), title, bypassed, self.groups[-1].width, extra)
        known = {n for n, _ in node.inputs}
        if unknown := set(values) - known:
            raise ValueError(f"{kind} has no input {', '.join(sorted(unknown))}")
        for input_name, definition in node.widgets:
            if input_name not in node.values:
                node.values[input_name] = default(input_name, definition)
        for input_name, definition in node.inputs:
            if not is_widget(definition) and input_name in info["input"].get("required", {}) and input_name not in values:
                raise ValueError(f"{kind}.{input_name} must be connected")
        self.nodes.append(node)
        self.groups[-1].items.append(node)
        return node

    def note(self, text: str) -> None:
        """A note in Markdown, as high as its text needs."""
        width = self.groups[-1].width
        lines = re.sub(r"\]\(\S+\)", "", text.strip()).split("\n")  # addresses do not show
        high = sum(16 * max(1, math.ceil(len(line) * 6.2 / (width - 50))) + (18 if line.startswith("#") else 4) for line in lines)
        self.groups[-1].items.append(Note(text.strip(), width, high + 50))

    def _lay_out(self) -> None:
        columns = sorted({g.column for g in self.groups})
        left = 0
        for column in columns:
            own = [g for g in self.groups if g.column == column]
            top = 0
            for group in own:
                group.place = (left, top)
                y = top + PADDING + TITLE + TITLE
                for item in group.items:
                    item.place = (left + PADDING, y)
                    y += item.height + PADDING + TITLE
                group.size = (group.width + 2 * PADDING, y - TITLE - top)
                top = y - TITLE + PADDING
            left += max(g.width for g in own) + 2 * PADDING + GAP

    def to_ui(self) -> dict:
        """The workflow as the UI saves it."""
        self._lay_out()
        links, nodes = [], []
        outgoing: dict[tuple[int, int], list[int]] = {}
        for node in self.nodes:
            slots = []
            for name, definition in sorted(node.inputs, key=lambda i: is_widget(i[1])):  # sockets first, as the frontend has them
                slot = {"name": name, "type": type_of(definition), "link": None}
                if is_widget(definition):
                    slot["widget"] = {"name": name}
                elif name in node.info["input"].get("optional", {}):
                    slot["shape"] = 7  # how the frontend draws an optional socket
                if isinstance(node.values.get(name), tuple):
                    source, output = node.values[name]
                    slot["link"] = len(links) + 1
                    links.append([slot["link"], source.number, output, node.number, len(slots), source.info["output"][output]])
                    outgoing.setdefault((source.number, output), []).append(slot["link"])
                slots.append(slot)
            nodes.append(self._ui_node(node, slots))
        for entry, node in zip(nodes, self.nodes, strict=True):
            for i, output in enumerate(entry["outputs"]):
                output["links"] = outgoing.get((node.number, i)) or None
        notes = [item for group in self.groups for item in group.items if isinstance(item, Note)]
        for i, note in enumerate(notes):
            nodes.append(
                {
                    "id": len(self.nodes) + 1 + i, "type": "MarkdownNote", "pos": list(note.place), "size": [note.width, note.height], "flags": {},
                    "order": 0, "mode": 0, "inputs": [], "outputs": [], "properties": {}, "widgets_values": [note.text], **NOTE_COLORS,
                }
            )  # fmt: skip
        groups = [
            {"id": i + 1, "title": g.title, "bounding": [*g.place, *g.size], "color": g.color, "font_size": 24, "flags": {}}
            for i, g in enumerate(self.groups)
        ]
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"sd35-ttt/{self.name}")), "revision": 0, "last_node_id": len(nodes), "last_link_id": len(links),
            "nodes": nodes, "links": links, "groups": groups, "config": {}, "extra": {"ds": {"scale": 0.6, "offset": [60, 60]}}, "version": 0.4,
        }  # fmt: skip

    def _ui_node(self, node: Node, slots: list[dict]) -> dict:
        values = []
        for name, definition in node.widgets:
            value = node.values[name]  # a widget that is fed by a link still has a value of its own in the file
            values.append(default(name, definition) if isinstance(value, tuple) else value)
            if has_control(name, definition):
                values.append("fixed")
        outputs = [{"name": n, "type": t, "links": None} for n, t in zip(node.info["output_name"], node.info["output"], strict=True)]
        properties = {"Node name for S&R": node.kind}
        if node.kind.startswith("TTT"):
            properties["aux_id"] = "sd35-ttt/sd35-ttt"
        else:
            properties["cnr_id"] = "comfy-core"
        entry = {
            "id": node.number, "type": node.kind, "pos": list(node.place), "size": [node.width, node.height], "flags": {},
            "order": node.number - 1, "mode": BYPASS if node.bypassed else 0, "inputs": slots, "outputs": outputs,
            "properties": properties, "widgets_values": values,
        }  # fmt: skip
        return entry | ({"title": node.title} if node.title else {})

    def to_api(self) -> dict:
        """The same graph as /prompt takes it: bypassed nodes are stepped over, sockets left open are left out."""
        graph = {}
        for node in self.nodes:
            if node.bypassed:
                continue
            inputs = {}
            for name, _ in node.inputs:
                value = node.values.get(name)
                if isinstance(value, tuple):
                    source, output = _through_bypassed(value)
                    value = [str(source.number), output]
                if value is not None:
                    inputs[name] = value
            graph[str(node.number)] = {"class_type": node.kind, "inputs": inputs, "_meta": {"title": node.title or node.info["display_name"]}}
        return graph


def _through_bypassed(link: tuple[Node, int]) -> tuple[Node, int]:
    """What a bypassed node passes on: its first connected input of the output's type."""
    node, output = link
    while node.bypassed:
        wanted = node.info["output"][output]
        node, output = next(node.values[n] for n, d in node.inputs if type_of(d) == wanted and isinstance(node.values.get(n), tuple))
    return node, output
