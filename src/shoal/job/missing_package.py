"""What to type where a script imports a package that is not installed."""

import importlib.util

# Packages whose name to install is another than the one to import.
INSTALLED_AS = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def install_command(error: BaseException) -> str | None:
    """None for any other error, and for a module that is missing inside a package that is there."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    if package != error.name and importlib.util.find_spec(package) is not None:
        return None
    if package in INSTALLED_AS:
        return f"pip install {INSTALLED_AS[package]}"
    return f"pip install {package}; a module of your own, {package}.py, belongs beside the script"
