"""One line for the licence of a package."""

from pathlib import PurePath

import pytest

from hetxl.data.build.licences import debian_licence, wheel_licence

READABLE = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: konatu

Files: *
Copyright: 2002 somebody
License: MIT
 The text of it.
 .
 License: of another sort, in the text

Files: debian/*
 debian/rules
Copyright: 2010 a maintainer
License: GPL-2+

Files: doc/a
 doc/b
License: OFL-1.1

Files: doc/c
License: MIT

License: GPL-2+
 On Debian systems, see elsewhere.
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (READABLE, "MIT, OFL-1.1 (see usr/share/doc/x/copyright)"),
        (
            "It is free; see the GNU\n  General Public License, or the public domain.",
            "see usr/share/doc/x/copyright, which mentions: GNU General Public License, public domain",
        ),
        ("Format: x\n\nLicensed under the SIL Open Font License.", "see .*which mentions: SIL Open Font License"),
        ("All you wish.", "see usr/share/doc/x/copyright"),
        (None, "see usr/share/doc/x/copyright"),
    ],
    ids=["machine-readable", "prose", "a format without names", "nothing known", "no file"],
)
def test_debian(tmp_path, text, expected):
    folder = tmp_path / "usr/share/doc/x"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "copyright").write_text(text)
    found = debian_licence("x", tmp_path)
    assert found == (expected if ".*" not in expected else expected.replace(".*", "usr/share/doc/x/copyright, "))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("License-Expression: MIT\nLicense: other", "MIT (see x/METADATA)"),
        ("License: Apache 2.0", "Apache 2.0 (see x/METADATA)"),
        ("License: UNKNOWN\nClassifier: License :: OSI Approved :: MIT License", "MIT License (see x/METADATA)"),
        ("License: A whole\n  text in lines\nClassifier: Topic :: Text", "see x/METADATA"),
        ("Summary: nothing", "see x/METADATA"),
    ],
)
def test_wheels(fields, expected):
    metadata = f"Metadata-Version: 2.1\nName: x\n{fields}\n\nLicense: in the body, which is no field\n"
    assert wheel_licence(metadata, PurePath("x/METADATA")) == expected
