"""A checkout on the path, without an installed package, plans as an installed one does."""

import importlib.metadata
import re

import jax
import jax.numpy as jnp

import aliquot as aq
from aliquot.core import version_of
from aliquot.launching._host import Host


def test_the_version_needs_no_installed_package(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    array = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = aq.plan(lambda w, x: w - x.T @ x, array, array, cluster=aq.Cluster.preset("2xcpu"))
    told = {plan.provenance.version, version_of("aliquot"), Host().versions()["aliquot"]}
    assert told == {aq.__version__} and re.fullmatch(r"\d+\.\d+\.\d+\S*", aq.__version__)
    assert version_of("jax") == "unknown"
