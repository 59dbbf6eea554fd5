"""The colours of pages and plots, for light and dark; every one of them has its meaning here and nowhere else.

Text has a contrast of 4.5 and lines one of 3 against the background (WCAG AA). What is as it should be is cool, what is
not is warm: blue and orange stay apart for every kind of colour blindness, and no colour is the only sign of anything.
"""

COOL = ("cool0", "cool1", "cool2", "cool3", "cool4")
WARM = ("warm0", "warm1", "warm2", "warm3")

LIGHT = {
    "ground": "#ffffff",
    "panel": "#f5f7f8",
    "ink": "#1a1f24",
    "muted": "#57606a",
    "rule": "#dde2e6",
    "accent": "#0a5aa8",
    "same": "#0b6650",
    "same-ground": "#e5f3ee",
    "differs": "#b3261e",
    "differs-ground": "#fcebe9",
    "failed": "#7d4800",
    "failed-ground": "#fbf0dc",
    "cool0": "#0072b2",
    "cool1": "#00806a",
    "cool2": "#5b4bb5",
    "cool3": "#2b93c4",
    "cool4": "#4c7a1f",
    "warm0": "#d04a00",
    "warm1": "#b0348c",
    "warm2": "#a87400",
    "warm3": "#8c1d40",
    "reference": "#c3cad1",
    "rerun": "#a3acb5",
    "tolerance": "#6b7681",
    "tolerance-ground": "#eef3f1",
    "heat0": "#edf0f2",
    "heat1": "#dbe9f4",
    "heat2": "#b5d4ea",
    "heat3": "#82b6dc",
    "heat4": "#4a90c4",
    "heat5": "#f7bf97",
    "heat6": "#ea8850",
    "heat7": "#c9481d",
    "heat8": "#861f07",
    "missing": "#2b3036",
}

DARK = {
    "ground": "#14171a",
    "panel": "#1c2125",
    "ink": "#e7eaed",
    "muted": "#9ba6b0",
    "rule": "#31383f",
    "accent": "#7db7f0",
    "same": "#62d2b5",
    "same-ground": "#13302a",
    "differs": "#ff998d",
    "differs-ground": "#3a1d1a",
    "failed": "#f0bb63",
    "failed-ground": "#332710",
    "cool0": "#4ea6e6",
    "cool1": "#35c2a0",
    "cool2": "#a79bff",
    "cool3": "#8fd8f5",
    "cool4": "#a4cc6a",
    "warm0": "#ff8346",
    "warm1": "#ec86cd",
    "warm2": "#e5b440",
    "warm3": "#ff7f9f",
    "reference": "#4a535c",
    "rerun": "#6c7781",
    "tolerance": "#939ea8",
    "tolerance-ground": "#1b2623",
    "heat0": "#20262b",
    "heat1": "#1c3044",
    "heat2": "#1f4566",
    "heat3": "#29618f",
    "heat4": "#3d86bf",
    "heat5": "#9a4d22",
    "heat6": "#d06f30",
    "heat7": "#f6a052",
    "heat8": "#ffd89a",
    "missing": "#ffffff",
}


def style_sheet() -> str:
    """The colours as CSS variables: light by default and on paper, dark on screens that ask for it."""
    return f":root{{{_variables(LIGHT)}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())
