"""Every crew passes the conformance tests of `tensorforge.testing.crew_conformance`."""

from __future__ import annotations

import pytest

from tensorforge.launch.crew.local_crew import LocalCrew
from tensorforge.testing.crew_conformance import CrewConformance


class TestLocalCrew(CrewConformance):
    @pytest.fixture
    def crew(self):
        crew = LocalCrew()
        yield crew
        crew.close()
