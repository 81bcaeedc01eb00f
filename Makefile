# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
# `make lab`: two Spark-like nodes on this machine, deployed and tested. `make test`: everything CI runs.
PYTHON ?= python3

.PHONY: lab lab-down test lint unit acceptance

lab:
	@$(PYTHON) tests/lab/lab.py up

lab-down:
	@$(PYTHON) tests/lab/lab.py down

test:
	@$(PYTHON) tests/run.py

# acceptance: two virtual machines with kernels of their own.
lint unit acceptance:
	@$(PYTHON) tests/run.py $@
