"""How long the control plane takes to start, beside `import torch` in the same run."""

import statistics
import subprocess
import sys
import time

CONTROL_PLANE = "import tensorforge.elastic, tensorforge.storage.database, tensorforge.cli.main"
REPEATS = 5


def seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started


def main() -> None:
    codes = {"python alone": "pass", "control plane": CONTROL_PLANE, "import torch": "import torch"}
    for code in codes.values():
        seconds(code)
    times: dict[str, list[float]] = {name: [] for name in codes}
    for _ in range(REPEATS):
        for name, code in codes.items():
            times[name].append(seconds(code))
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, value in median.items():
        print(f"{name:15} {value * 1000:8.0f} ms")
    ratio = median["control plane"] / median["import torch"]
    print(f"control plane / import torch: {ratio:.2f} (aim: under 0.33)")


if __name__ == "__main__":
    main()
