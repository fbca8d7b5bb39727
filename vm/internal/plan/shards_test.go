package plan

import (
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// sharded plans exp(x v w) for a rank that updates the elements of v and w that two shards name, in
// one bucket or in two.
func sharded(t *testing.T, ofV, ofW Shard, change func(*Update), buckets ...int) *Plan {
	t.Helper()
	p, dv, dw := backward()
	updates := []Update{{Input: 1, Gradient: dv, Kept: 1, Bucket: buckets[0], Shard: &ofV,
		Rule: descent}, {Input: 2, Gradient: dw, Kept: 1, Bucket: buckets[1], Shard: &ofW,
		Rule: descent}}
	for i := range updates {
		change(&updates[i])
	}
	planned, err := New(&p.Program, updates...)
	if err == nil {
		err = Verify(planned)
	}
	if err != nil || planned.Doubt != nil {
		t.Fatalf("%v, %v in\n%v", err, planned.Doubt, planned)
	}
	return planned
}

// TestShards: a bucket is reduce-scattered, a rank updates its shards with vectors of these alone,
// and all variables are gathered.
func TestShards(t *testing.T) {
	const update, both = "update", "update of 2"
	backwards := []string{"matmul NN", "matmul NN", "loop exp", "matmul TN"}
	apart := []string{"scatter bucket 0", "matmul NT", "matmul TN", "scatter bucket 1"}
	clip := func(u *Update) { u.Limit, u.Parts = 1, true }
	for _, test := range []struct {
		name     string
		ofV, ofW Shard
		change   func(*Update)
		buckets  []int
		want     []string
	}{
		{"two buckets", Shard{0, 5}, Shard{7, 16}, func(*Update) {}, []int{2, 1},
			slices.Concat(apart, []string{"receive shard of bucket 0", update, "gather bucket 0",
				"receive shard of bucket 1", update, "gather bucket 1",
				"receive shards of bucket 0", "assign", "receive shards of bucket 1", "assign"})},
		{"nothing of a bucket", Shard{0, 0}, Shard{0, 16}, func(*Update) {}, []int{2, 1},
			slices.Concat(apart, []string{"receive shard of bucket 0", update, "gather bucket 0",
				"receive shard of bucket 1", "gather bucket 1", "receive shards of bucket 0",
				"assign", "receive shards of bucket 1", "assign"})},
		{"one bucket", Shard{15, 16}, Shard{0, 3}, func(*Update) {}, []int{1, 1},
			[]string{"matmul NT", "matmul TN", "scatter bucket 0", "receive shard of bucket 0",
				both, "gather bucket 0", "receive shards of bucket 0", "assign of 2"}},
		{"clipped", Shard{8, 16}, Shard{0, 3}, clip, []int{1, 1},
			[]string{"matmul NT", "matmul TN", "scatter bucket 0", "receive shard of bucket 0",
				"squares of 2", "loop norm", "sum of the squares of all parts", "loop norm",
				both, "gather bucket 0", "receive shards of bucket 0", "assign of 2"}},
		{"clipped, and nothing here", Shard{}, Shard{}, clip, []int{1, 1},
			[]string{"matmul NT", "matmul TN", "scatter bucket 0", "receive shard of bucket 0",
				"loop norm", "sum of the squares of all parts", "loop norm",
				"gather bucket 0", "receive shards of bucket 0", "assign of 2"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			planned := sharded(t, test.ofV, test.ofW, test.change, test.buckets...)
			var names []string
			for _, s := range planned.Steps {
				names = append(names, s.Op.String())
			}
			if !slices.Equal(names, append(backwards, test.want...)) {
				t.Errorf("the steps are\n%v, want %q", planned, test.want)
			}
			kept, want := 0, 4*(test.ofV.To-test.ofV.From+test.ofW.To-test.ofW.From)
			for _, b := range planned.Buffers {
				if b.Kind == State {
					kept += b.Bytes
				}
			}
			if kept != want {
				t.Errorf("the rank keeps %d bytes, want %d", kept, want)
			}
		})
	}
}

// TestShardsAccumulate: sums of runs stay whole until the last one.
func TestShardsAccumulate(t *testing.T) {
	planned := sharded(t, Shard{3, 5}, Shard{7, 16}, func(u *Update) {
		u.Accumulation, u.Scale = Accumulation{Runs: 3}, 0.5
	}, 2, 1)
	for _, s := range planned.Steps {
		switch s.Op.(type) {
		case Send, Receive, Joined:
			if s.Runs != 1<<2 {
				t.Errorf("%v in the runs %b", s.Op, s.Runs)
			}
		}
	}
}

// TestVerifyShards: what a plan of shards may not do is found.
func TestVerifyShards(t *testing.T) {
	planned := sharded(t, Shard{3, 5}, Shard{7, 16}, func(*Update) {}, 2, 1)
	at := func(name string) int {
		return slices.IndexFunc(planned.Steps, func(s Step) bool { return s.Op.String() == name })
	}
	scatter, shard := at("scatter bucket 0"), at("receive shard of bucket 0")
	gather, shards := at("gather bucket 0"), at("receive shards of bucket 0")
	for what, damage := range map[string]func(s []Step){
		"the ranks divide": func(s []Step) {
			s[scatter].Op = Send{Bucket: 1}
		},
		"nothing has been sent": func(s []Step) {
			s[shards].Op = Receive{3, s[shards].Op.(Receive).Kind}
		},
		"does not exchange": func(s []Step) { s[gather].Dsts = s[gather].Dsts[:0] },
		"written over": func(s []Step) { // the update reads what has left
			s[shard+1].Args[0] = s[scatter].Dsts[0]
			s[shard+1].Args[0].Shape, s[shard+1].Args[0].Strides = ir.Of(9), ir.Of(1)
		},
		"not what it must be": func(s []Step) { // it updates elements that are another rank's
			for k, a := range s[shard+1].Args {
				if planned.Buffers[a.Buffer].Kind == Input {
					s[shard+1].Args[k].Offset = 6
				}
			}
		},
	} {
		broken := *planned
		broken.Steps = slices.Clone(planned.Steps)
		for i := range broken.Steps {
			broken.Steps[i].Dsts, broken.Steps[i].Args = slices.Clone(broken.Steps[i].Dsts),
				slices.Clone(broken.Steps[i].Args)
		}
		damage(broken.Steps)
		if err := Verify(&broken); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want %q in\n%v", err, what, &broken)
		}
	}
	broken := *planned
	broken.updates = slices.Clone(planned.updates)
	broken.updates[1].Shard = &Shard{6, 15}
	if err := Verify(&broken); err == nil {
		t.Error("a shard that is another rank's is proven")
	}
}
