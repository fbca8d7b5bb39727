package residence

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestCopiesAreCounted(t *testing.T) {
	var s Copies
	w, other := backend.Of([]float32{1, 2}), backend.Of([]float32{1, 2})
	reader := s.Enter(w, Reads)
	require.Check(t, !s.Stays(reader) && !s.Written(reader), "a copy for one reader")
	writer := s.Enter(w, Writes)
	require.That(t, writer == reader && s.Enter(other, Reads) != reader, "copies are not by memory")
	require.Check(t, s.Stays(writer) && s.Written(writer), "no copy for a writer and a reader")
	writer.Device, writer.Fresh = backend.OnDevice(backend.F32, 256, 2), true
	if unused := s.Leave(writer, Writes); unused.Len() != 0 || reader.Fresh || s.Stays(reader) {
		t.Errorf("after the writer: unused %v, fresh %v", unused, reader.Fresh)
	}
	if second := s.Enter(w, Reads); second != reader || !s.Stays(reader) || s.Written(reader) {
		t.Error("two readers have no copy")
	}
	s.Leave(reader, Reads)
	unused := s.Leave(reader, Reads)
	require.Check(t, unused.Addr() == 256, "the last user is given %v to free", unused)
	again := s.Enter(w, Reads)
	require.Check(t, again != reader, "a copy that nobody uses is used again")
}

// TestWhatIsHeldIsSentOnceAndNeverBroughtBack: also while another machine writes it.
func TestWhatIsHeldIsSentOnceAndNeverBroughtBack(t *testing.T) {
	var s Copies
	w := backend.Of([]float32{1, 2})
	c := s.Enter(w, Reads)
	c.Fresh = true
	s.Enter(w, Holds)
	require.Check(t, !c.Fresh && s.Held(c) && s.Stays(c) && !s.Written(c), "held: %+v", c)
	s.Send(c, s.Source(c))
	s.Enter(w, Writes)
	require.Check(t, c.Fresh && s.Written(c) && s.Newer(w), "held and written: %+v", c)
	s.Leave(c, Writes)
	require.Check(t, !c.Fresh && s.Held(c) && !s.Newer(w), "after the writer: %+v", c)
	s.Send(c, s.Source(c))
	Write(w, backend.Of([]float32{3, 4}))
	require.Check(t, !s.Current(c), "what the host has written is current: %+v", c)
	s.Enter(w, Writes)
	require.Check(t, !c.Fresh, "a writer begins with what the host has overwritten: %+v", c)
	s.Leave(c, Writes)
	s.Leave(c, Holds)
	require.Check(t, !c.Fresh && !s.Held(c), "after the holder: %+v", c)
}

// TestMarksThatTheHostHasCopiedAreNotOfACopy: who copies a tensor that is older on the host copies
// its marks, too, and no device has newer elements of the tensor that gets them.
func TestMarksThatTheHostHasCopiedAreNotOfACopy(t *testing.T) {
	var s Copies
	trained, other := backend.Of([]float32{1, 2, 3}), backend.Of([]float32{4, 5, 6})
	writer, reader := s.Enter(trained, Writes), s.Enter(other, Reads)
	second := s.Enter(other, Writes)
	writer.Fresh = true
	writer.Outdate()
	copy(other.Bytes(), trained.Bytes())
	if Present(other) != OnDevice || s.Newer(other) || !s.Newer(trained) {
		t.Errorf("%v, newer: %v, %v", Present(other), s.Newer(other), s.Newer(trained))
	}
	s.Leave(second, Writes)
	s.Leave(reader, Reads)
	if s.Leave(writer, Writes); Present(trained) != nil || Present(other) != OnDevice {
		t.Errorf("after the machines: %v, %v", Present(trained), Present(other))
	}
}
