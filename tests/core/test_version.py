"""A checkout on the path, without an installed package, plans as an installed one does."""

import importlib.metadata

import jax
import jax.numpy as jnp

import aliquot as aq
from aliquot.core import version_of


def test_a_plan_needs_no_installed_package(monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name == "aliquot":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    array = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = aq.plan(lambda w, x: w - x.T @ x, array, array, cluster=aq.Cluster.preset("2xcpu"))
    assert plan.provenance.version == version_of("aliquot") == "unknown"
