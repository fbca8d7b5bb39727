package elastic

import (
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestTheStateIsLostOnlyWhenThoseThatHaveItAreDead(t *testing.T) {
	view := View{Generation: 1, Members: []ID{1, 2}, At: []Position{{Phase: Computing}, {}}}
	p, _ := NewReplacement(2, Limits{1, 2}, First(1))
	p.Step(Decided{view})
	p.Step(Broken{Generation: 1})
	p.Step(Probed{Generation: 1})
	actions := p.Step(GraceOver{1})
	require.Check(t, len(actions) == 0, "process 1 is silent, and process 2 does %v", actions)
	if actions := p.Step(Dead{1}); !slices.Contains(actions, Action(Stop{StateLost})) {
		t.Errorf("process 1 is dead, and process 2 does %v", actions)
	}
}
