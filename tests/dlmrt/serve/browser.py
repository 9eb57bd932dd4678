"""A headless Chromium driven over its debugging pipe: no driver program, no websocket, no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page in one browser process.

    Args:
        profile: empty folder for the browser's files.
    """

    def __init__(self, profile: Path, *, width: int = 1200, height: int = 900) -> None:
        assert CHROMIUM is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command], pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(profile)},
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._count, self._buffer, self._session = 0, b"", None
        self.complaints: list[str] = []  # errors and warnings of the page's console
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(answer["params"])[:500])
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def resize(self, width: int, height: int, *, is_mobile: bool = False, scale: float = 1) -> None:
        """Size of the view in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_mobile
        )

    def dark(self, is_dark: bool) -> None:
        """The colour scheme that the system asks for."""
        value = "dark" if is_dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def open(self, url: str) -> None:
        """Load a page and wait for it."""
        self.send("Page.navigate", url=url)
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def run(self, script: str) -> Any:
        """Value of an expression in the page; promises are awaited."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait in the page until an expression is true; a minute at the most."""
        self.run(
            "new Promise((done, fail) => { const began = Date.now(); const look = () => {"
            f"if ({condition}) done(); else if (Date.now() - began > 60000) fail(new Error('waited in vain'));"
            "else setTimeout(look, 5); }; look(); })"
        )

    def press(self, key: str, *, modifiers: int = 0, code: int = 0) -> None:
        """A key press as the keyboard sends it."""
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        fields = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text: str) -> None:
        """Text into the focused element."""
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        """A PNG of the view, or of the whole page."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser and wait for it."""
        self._process.terminate()
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)
