"""A headless Chromium for tests, and how pictures of it are compared: coarsely, since fonts differ between machines."""

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

SCREENS = Path(__file__).parent / "data" / "screens"
CELL, MOST = 40, 0.06
"""Pictures are averaged over squares of so many pixels; a mean difference of 6 % of the range is another look."""
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--force-device-scale-factor=1", "--hide-scrollbars",
    "--font-render-hinting=none", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)  # fmt: skip


@contextmanager
def chromium():
    """A driver of the Chromium that `make test` installs."""
    paths = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    assert all(paths.values()), "no Chromium: `make browser` installs Debian's packages chromium and chromium-driver"
    with tempfile.TemporaryDirectory() as profile:
        options = ChromeOptions()
        options.binary_location = paths["chromium"]
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = ChromeService(paths["chromedriver"], log_output=subprocess.DEVNULL, env={**os.environ, "SE_OFFLINE": "true"})
        driver = Chrome(options, service)
        driver.set_script_timeout(60)
        try:
            yield driver
        finally:
            driver.quit()


def look(driver, width: int, height: int, dark: bool) -> None:
    """The size of the window, and the colour scheme that the system asks for."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    )
    features = [
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def coarse(path: Path) -> np.ndarray:
    """A picture averaged over squares, [rows, columns, 3] of 0..1."""
    with Image.open(path) as picture:
        size = max(1, picture.width // CELL), max(1, picture.height // CELL)
        return np.asarray(picture.convert("RGB").resize(size, Image.Resampling.BOX), dtype=float) / 255


def assert_looks_as_stored(driver, name: str) -> None:
    """Compares what the window shows with the stored picture; SHARDPLAN_SCREENS=write stores it."""
    stored = SCREENS / f"{name}.png"
    if os.environ.get("SHARDPLAN_SCREENS") == "write":
        SCREENS.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(stored))
        with Image.open(stored) as picture:
            picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(stored, optimize=True)
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now.png"
        driver.save_screenshot(str(now))
        seen, expected = coarse(now), coarse(stored)
        assert seen.shape == expected.shape, f"{name}: {seen.shape} against {expected.shape}"
        difference = float(np.abs(seen - expected).mean())
        assert difference <= MOST, f"{name} looks otherwise: mean difference {difference:.3f} of {MOST}; see {stored}"
