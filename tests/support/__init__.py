"""What tests share: drawn strategies, ranks that live on, commands in this process or a forked one."""
