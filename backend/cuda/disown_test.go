package cuda

import (
	"errors"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

func TestDisownedMemoryIsTheCallers(t *testing.T) {
	c, source := newTight(1 << 20)
	q := &steps{}
	a, b := must[uintptr](t)(c.take(q, 1000)), must[uintptr](t)(c.take(q, 1000))
	ok(t, c.disown(a))
	for what, err := range map[string]error{
		"disown again": c.disown(a), "free": c.give(a, q), "disown the middle": c.disown(b + 8), "disown what is nobody's": c.disown(8),
	} {
		if !errors.Is(err, backend.ErrArgument) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if s := c.snapshot(); s.InUse != 1024 || c.owns(a) || !c.owns(b) {
		t.Errorf("%+v", s)
	}
	ok(t, c.give(b, q))
	if err := c.disown(b); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("disown freed memory: %v", err)
	}
	ok(t, c.close())
	if len(source.sizes) != 1 || source.sizes[a] != 1024 {
		t.Errorf("after close the source has given out %v", source.sizes)
	}
}
