"""Silos that drop out at random, in any order: a sum is exact or there is none."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_network import CONTEXT, carry, contribute, names, random_values, run_sum, table_of

from secure_fvi.aggregation import Masked
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.errors import AggregationError, ProtocolError


class TestRandomDropouts:
    @given(
        count=st.integers(3, 9),
        check=st.booleans(),
        batch=st.sampled_from([1, 2, 64]),
        data=st.data(),
    )
    @settings(max_examples=80, deadline=None)
    def test_a_sum_is_exact_or_there_is_none(self, count, check, batch, data):
        ids = sorted(names(count))
        table = table_of(6)
        server, silos = local_parties(Masked(consistency_check=check, batch=batch, max_missing=count), ids)
        some = st.sets(st.sampled_from(ids), max_size=max(1, count // 2))
        order = data.draw(st.permutations(ids))
        for index in range(2):
            lost = data.draw(st.lists(some, max_size=5))
            try:
                carry(server.prepare(index), silos, lost)
            except AggregationError:
                continue
            values = random_values(ids, table, seed=index)
            cohort = sorted(set(ids) - data.draw(some))
            absent = data.draw(some)
            messages = {}
            for silo in order:
                if silo in cohort and silo not in absent:
                    try:
                        messages |= contribute(silos, index, table, {silo: values[silo]}, cohort)
                    except ProtocolError:
                        continue
            try:
                total = carry(
                    server.total(index, cohort, table, messages, CONTEXT), silos, data.draw(st.lists(some, max_size=2))
                )
            except AggregationError:
                continue
            assert set(total.survivors) == set(messages)
            np.testing.assert_allclose(total.values, sum(values[s] for s in messages), rtol=0, atol=1e-9)

    def test_nobody_lost_is_always_a_sum(self):
        # The control of the test above, whose every sum could be refused.
        for count in range(3, 10):
            for check in (True, False):
                ids, table = names(count), table_of(6)
                server, silos = local_parties(Masked(consistency_check=check, max_missing=count), ids)
                values = random_values(ids, table)
                assert len(run_sum(server, silos, 0, table, values).survivors) == count
