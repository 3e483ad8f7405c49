"""What suites and tests share: instruments, paged memory, reference models, a CPU's graphs."""
