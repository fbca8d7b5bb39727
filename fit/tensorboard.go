package fit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"gorgonia.org/gorgonia"
)

// TensorBoard writes event files to a directory, on rank 0, for "tensorboard --logdir dir", also
// while the training runs: after each step its loss, the rate of [Schedule], the samples per second
// of all ranks and, with vm.ClipNorm, the norm of the gradients; after each epoch its loss and the
// metrics of [Validate]. Numbers are rounded to float32.
//
// A training that resumes adds a file: TensorBoard forgets the steps behind the checkpoint, which
// are done again. A training that begins anew replaces the curves that dir has in the same way, so
// give each its own. An empty dir writes nothing.
//
// After each epoch it also writes histograms of the nodes given: variables, and what the machine
// keeps (vm.Keep) of its last run on rank 0, such as gradients of its samples, which gorgonia.Grad
// returns.
//
// Cost: a write of some 100 bytes a step; an epoch, a copy of these variables from the device,
// and rank 0 makes one of each node as float64.
func TensorBoard(dir string, histograms ...*gorgonia.Node) Option {
	return given("TensorBoard", "histograms", histograms, func(t *trainer) {
		t.once("TensorBoard")
		if dir != "" {
			t.trackers = append(t.trackers, &eventFile{dir: dir})
			t.counted = histograms
		}
	})
}

// eventFile is a file of TensorBoard's events: messages of tensorflow/core/util/event.proto in
// records of tensorflow/core/lib/io/record_writer.h.
type eventFile struct {
	dir string
	to  *os.File
}

// Fields of the messages Event, Summary, Summary.Value and SessionLog.
const (
	eventTime, eventStep, eventVersion  protowire.Number = 1, 2, 3
	eventSummary, eventSession          protowire.Number = 5, 7
	summaryValue, valueTag, valueSimple protowire.Number = 1, 1, 2
	valueHistogram                      protowire.Number = 5
	sessionStatus, sessionStarted                        = protowire.Number(1), 1
)

// prefix begins the names of event files. Readers take the files of a directory in their order, and
// never return to an earlier one.
const prefix = "events.out.tfevents."

// open makes a file behind all others.
func (f *eventFile) open(_ *trainer, step int) error {
	err := os.MkdirAll(f.dir, 0o777)
	if err != nil {
		return fmt.Errorf("fit.TensorBoard: %w", err)
	}
	files, err := os.ReadDir(f.dir)
	number := time.Now().Unix()
	for _, file := range files {
		var of int64
		if n, _ := fmt.Sscanf(file.Name(), prefix+"%d", &of); n == 1 {
			number = max(number, of+1)
		}
	}
	for f.to == nil && err == nil {
		path := filepath.Join(f.dir, fmt.Sprintf("%s%010d.euryale", prefix, number))
		f.to, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		if number++; errors.Is(err, fs.ErrExist) { // another job's
			err = nil
		}
	}
	if err == nil {
		err = f.begin(time.Now(), step)
	}
	if err != nil {
		err = fmt.Errorf("fit.TensorBoard: %w", err)
	}
	return err
}

// begin makes readers forget what earlier files have of a step and of later ones.
func (f *eventFile) begin(at time.Time, step int) error {
	err := f.write(at, step, eventVersion, []byte("brain.Event:2"))
	if err == nil {
		started := protowire.AppendTag(nil, sessionStatus, protowire.VarintType)
		err = f.write(at, step, eventSession, protowire.AppendVarint(started, sessionStarted))
	}
	return err
}

func (f *eventFile) tell(p point) error {
	var summary []byte
	for name, x := range p.all {
		value := protowire.AppendTag(nil, valueSimple, protowire.Fixed32Type)
		summary = appendValue(summary, name, protowire.AppendFixed32(value,
			math.Float32bits(float32(x))))
	}
	for _, h := range p.histograms {
		if h.least > h.most { // no element is finite
			continue
		}
		value := protowire.AppendTag(nil, valueHistogram, protowire.BytesType)
		summary = appendValue(summary, h.name, protowire.AppendBytes(value, h.encoded()))
	}
	if err := f.write(p.at, p.step, eventSummary, summary); err != nil {
		return fmt.Errorf("fit.TensorBoard: %w", err)
	}
	return nil
}

// appendValue appends a value of a name, whose other fields it is given.
func appendValue(summary []byte, name string, fields []byte) []byte {
	value := protowire.AppendTag(nil, valueTag, protowire.BytesType)
	value = append(protowire.AppendString(value, name), fields...)
	return protowire.AppendBytes(protowire.AppendTag(summary, summaryValue, protowire.BytesType),
		value)
}

// write appends an event with one field of content. Readers see it at once.
func (f *eventFile) write(at time.Time, step int, field protowire.Number, content []byte) error {
	event := protowire.AppendTag(nil, eventTime, protowire.Fixed64Type)
	event = protowire.AppendFixed64(event, math.Float64bits(float64(at.UnixMicro())/1e6))
	event = protowire.AppendTag(event, eventStep, protowire.VarintType)
	event = protowire.AppendVarint(event, uint64(step))
	event = protowire.AppendTag(event, field, protowire.BytesType)
	event = protowire.AppendBytes(event, content)
	record := binary.LittleEndian.AppendUint64(nil, uint64(len(event)))
	record = binary.LittleEndian.AppendUint32(record, masked(record))
	record = append(record, event...)
	record = binary.LittleEndian.AppendUint32(record, masked(event))
	_, err := f.to.Write(record)
	return err
}

// masked is the checksum of a record, which other checksums may cover: rotated, plus a constant.
func masked(of []byte) uint32 {
	sum := crc32.Checksum(of, crc32.MakeTable(crc32.Castagnoli))
	return (sum>>15 | sum<<17) + 0xa282ead8
}

func (f *eventFile) close(string) { _ = f.to.Close() } // each write has told of its error
