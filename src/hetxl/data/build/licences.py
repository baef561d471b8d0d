"""The licence of a package in one line, from its own files."""

import re
from email.parser import HeaderParser
from pathlib import Path, PurePath

PHRASES = {
    r"GNU\s+General\s+Public\s+Licen[sc]e": "GNU General Public License",
    r"GNU\s+(?:Lesser|Library)\s+General\s+Public\s+Licen[sc]e": "GNU Lesser General Public License",
    r"SIL\s+Open\s+Font\s+Licen[sc]e": "SIL Open Font License",
    r"Arphic\s+Public\s+Licen[sc]e": "Arphic Public License",
    r"IPA\s+Font\s+Licen[sc]e": "IPA Font License",
    r"Apache\s+Licen[sc]e": "Apache License",
    r"Creative\s+Commons": "Creative Commons",
    r"WordNet\s+(?:Release|Licen[sc]e|\d)": "WordNet licence",
    r"public\s+domain": "public domain",
}
"""What to look for in a text that no program can read, and what to call it."""


def debian_licence(name: str, root: Path) -> str:
    """The licences that a Debian package's copyright file names, without that of the packaging itself.

    Args:
        name: of the package.
        root: where it was unpacked.
    """
    where = f"usr/share/doc/{name}/copyright"
    try:
        text = (root / where).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"see {where}"
    if re.match(r"(Format|Format-Specification):", text):
        found = _machine_readable(text)
        if found:
            return f"{', '.join(found)} (see {where})"
    mentioned = [called for phrase, called in PHRASES.items() if re.search(phrase, text, re.IGNORECASE)]
    return f"see {where}" + (f", which mentions: {', '.join(mentioned)}" if mentioned else "")


def wheel_licence(metadata: str, where: PurePath) -> str:
    """The licence that the METADATA of a wheel names.

    Args:
        metadata: its text.
        where: the path of the file in the wheel.
    """
    fields = HeaderParser().parsestr(metadata)
    named = [fields.get("License-Expression", ""), fields.get("License", "")]
    named += [value.rsplit("::", 1)[-1] for value in fields.get_all("Classifier", []) if value.startswith("License ::")]
    # Some put a whole text in the field: that is no name.
    for text in map(str.strip, named):
        if text and text.upper() != "UNKNOWN" and "\n" not in text and len(text) <= 100:
            return f"{text} (see {where.as_posix()})"
    return f"see {where.as_posix()}"


def _machine_readable(text: str) -> list[str]:
    """Short names of the licences of all files but the packaging, each once."""
    found: list[str] = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        files = re.search(r"^Files:((?:.*)(?:\n[ \t].*)*)", paragraph, re.MULTILINE)
        licence = re.search(r"^License:[ \t]*(\S.*)", paragraph, re.MULTILINE)
        if files is None or licence is None or all(name.startswith("debian/") for name in files[1].split()):
            continue
        if licence[1].strip() not in found:
            found.append(licence[1].strip())
    return found
