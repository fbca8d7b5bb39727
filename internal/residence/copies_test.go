package residence

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestCopiesAreCounted(t *testing.T) {
	var s Copies
	w, other := backend.Of([]float32{1, 2}), backend.Of([]float32{1, 2})
	reader := s.Enter(w, false)
	require.Check(t, !s.Stays(reader) && !s.Written(reader), "a copy for one reader")
	writer := s.Enter(w, true)
	require.That(t, writer == reader && s.Enter(other, false) != reader, "copies are not by memory")
	require.Check(t, s.Stays(writer) && s.Written(writer), "no copy for a writer and a reader")
	writer.Device, writer.Fresh = backend.OnDevice(backend.F32, 256, 2), true
	if unused := s.Leave(writer, true); unused.Len() != 0 || reader.Fresh || s.Stays(reader) {
		t.Errorf("after the writer: unused %v, fresh %v", unused, reader.Fresh)
	}
	if second := s.Enter(w, false); second != reader || !s.Stays(reader) || s.Written(reader) {
		t.Error("two readers have no copy")
	}
	s.Leave(reader, false)
	unused := s.Leave(reader, false)
	require.Check(t, unused.Addr() == 256, "the last user is given %v to free", unused)
	again := s.Enter(w, false)
	require.Check(t, again != reader, "a copy that nobody uses is used again")
}

// TestMarksThatTheHostHasCopiedAreNotOfACopy: who copies a tensor that is older on the host copies
// its marks, too, and no device has newer elements of the tensor that gets them.
func TestMarksThatTheHostHasCopiedAreNotOfACopy(t *testing.T) {
	var s Copies
	trained, other := backend.Of([]float32{1, 2, 3}), backend.Of([]float32{4, 5, 6})
	writer, reader, second := s.Enter(trained, true), s.Enter(other, false), s.Enter(other, true)
	writer.Fresh = true
	writer.Outdate()
	copy(other.Bytes(), trained.Bytes())
	if Present(other) != OnDevice || s.Newer(other) || !s.Newer(trained) {
		t.Errorf("%v, newer: %v, %v", Present(other), s.Newer(other), s.Newer(trained))
	}
	s.Leave(second, true)
	s.Leave(reader, false)
	if s.Leave(writer, true); Present(trained) != nil || Present(other) != OnDevice {
		t.Errorf("after the machines: %v, %v", Present(trained), Present(other))
	}
}
