"""What starts a training's ranks: files written for launchers, and commands, batch scripts and manifests read."""
