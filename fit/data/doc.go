// Package data reads samples for package fit: tables, images and text.
//
//	samples, classes, err := data.CSV("iris.csv", "species")  // row: []float32 [columns], []int
//	digits, err := data.IDX("images.gz", "labels.gz")         // row: []float32 [h w], []int
//	tiny, err := data.CIFAR(10, "data_batch_1.bin", ...)      // row: []float32 [3 32 32], []int
//	photos, classes, err := data.Images("photos", 64, 64)     // row: []float32 [3 64 64], []int
//	text, characters, err := data.Text("book.txt", 128)       // row: []int [128], []int [128]
//	rows, err := data.Tensors(x, y)                           // row: as the tensors
//
// Each is a [fit.Set], which several goroutines may read. Pixels range from 0 to 1. Each []float32
// may be a []float64, too; integers that a []float32 would round are errors.
//
// Which class has which number, and which column comes first, follows from the files of the
// training. Give it to the reader of other files; [fit.ReadMapping] has it from a checkpoint:
//
//	held, _, err := data.CSV("held.csv", "species", data.MappingOf(samples))
//
// Readers trust no file: if one is truncated, or has another format or wrong numbers, they return
// an error that names it. Files are regular ones: a pipe, as /dev/stdin may be, is refused. They
// allocate no more than a small multiple of the file's length. Files whose name ends in .gz are
// unpacked, to at most 4 GiB.
//
// [fit.ReadMapping]: https://pkg.go.dev/github.com/euryale-ml/euryale/fit#ReadMapping
// [fit.Set]: https://pkg.go.dev/github.com/euryale-ml/euryale/fit#Set
package data
