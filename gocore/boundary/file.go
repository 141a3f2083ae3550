package boundary

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/memory"
)

// chunkLen is how much is converted, summed and written at a time: it stays in the cache between the three, and it bounds how
// long a cancelled job goes on.
const chunkLen = 256 << 10

var zeros [memory.Alignment]byte

var errChecksum = errors.New("its payload checksum does not match")

// fileLen is the length of the file for a layout with that header.
func fileLen(header []byte, l *layout) int64 { return payloadStart(header) + l.packLen + crcLen }

// payloadWriter appends to a file and keeps the payload's sum.
type payloadWriter struct {
	file File
	sum  uint32
	off  int64 // in the payload
	stop func() error
}

func (w *payloadWriter) write(p []byte) error {
	if err := w.stop(); err != nil {
		return err
	}
	w.sum = crc32.Update(w.sum, castagnoli, p)
	w.off += int64(len(p))
	return writeAll(w.file, p)
}

func writeAll(file File, p []byte) error {
	n, err := file.Write(p)
	if err == nil && n < len(p) {
		err = io.ErrShortWrite
	}
	return err
}

// writeFile writes l's boundary to path, from readable memory at base or from the spans' sources if base is nil. The file
// appears under its name only when it is complete; after an error there is none. chunk is chunkLen bytes of scratch memory,
// needed if l is encoded.
func writeFile(fs FS, path string, header []byte, l *layout, base unsafe.Pointer, chunk []byte, stop func() error) (err error) {
	temp := path + ".tmp"
	file, err := fs.Create(temp)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, fs.Remove(temp))
		}
	}()
	err = writeBody(file, header, l, base, chunk, stop)
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	return fs.Rename(temp, path)
}

func writeBody(file File, header []byte, l *layout, base unsafe.Pointer, chunk []byte, stop func() error) (err error) {
	defer recovered(&err)
	start := make([]byte, payloadStart(header))
	copy(start, header)
	if err := writeAll(file, start); err != nil {
		return err
	}
	w := &payloadWriter{file: file, stop: stop}
	for i := range l.spans {
		s := &l.spans[i]
		for w.off < s.packOff {
			if err := w.write(zeros[:min(s.packOff-w.off, int64(len(zeros)))]); err != nil {
				return err
			}
		}
		if err := w.span(s, l.from(i, base), chunk); err != nil {
			return err
		}
	}
	return writeAll(file, binary.LittleEndian.AppendUint32(nil, w.sum))
}

func (w *payloadWriter) span(s *span, from unsafe.Pointer, chunk []byte) error {
	if s.code == asIs {
		data := unsafe.Slice((*byte)(from), s.memLen)
		for len(data) > 0 {
			n := min(len(data), chunkLen)
			if err := w.write(data[:n]); err != nil {
				return err
			}
			data = data[n:]
		}
		return nil
	}
	count, elem := s.memLen/int64(s.elem), int64(s.elem)
	for done := int64(0); done < count; {
		n := min(count-done, chunkLen/2)
		if err := s.code.encode(unsafe.Pointer(unsafe.SliceData(chunk)), unsafe.Add(from, done*elem), n, s.elem); err != nil {
			return err
		}
		if err := w.write(chunk[:2*n]); err != nil {
			return err
		}
		done += n
	}
	return nil
}

// readFile reads the boundary at path into readable memory at base, having checked that the file is exactly the one that was
// written with header. chunk as for writeFile.
func readFile(fs FS, path string, header []byte, l *layout, base unsafe.Pointer, chunk []byte, stop func() error) (err error) {
	file, err := fs.Open(path)
	if err != nil {
		return err
	}
	err = readBody(file, header, l, base, chunk, stop)
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	return err
}

func readBody(file File, header []byte, l *layout, base unsafe.Pointer, chunk []byte, stop func() error) (err error) {
	defer recovered(&err)
	size, err := file.Size()
	if err != nil {
		return err
	}
	start := make([]byte, payloadStart(header))
	if _, err := io.ReadFull(file, start[:min(int64(len(start)), size)]); err != nil {
		return fmt.Errorf("short read: %w", err)
	}
	if !bytes.Equal(start[:len(header)], header) {
		if _, _, _, err := decodeHeader(start); err != nil {
			return err
		}
		return fmt.Errorf("%w: its header is another boundary's", errForeign)
	}
	if want := fileLen(header, l); size != want {
		return fmt.Errorf("it has %d bytes instead of %d: truncated or overwritten", size, want)
	}
	r := &payloadReader{file: file, stop: stop}
	for i := range l.spans {
		s := &l.spans[i]
		var skip [memory.Alignment]byte
		for r.off < s.packOff {
			if err := r.read(skip[:min(s.packOff-r.off, int64(len(skip)))]); err != nil {
				return err
			}
		}
		if err := r.span(s, unsafe.Add(base, s.memOff), chunk); err != nil {
			return err
		}
	}
	var sum [crcLen]byte
	if _, err := io.ReadFull(file, sum[:]); err != nil {
		return fmt.Errorf("short read: %w", err)
	}
	if binary.LittleEndian.Uint32(sum[:]) != r.sum {
		return errChecksum
	}
	return nil
}

type payloadReader struct {
	file File
	sum  uint32
	off  int64
	stop func() error
}

func (r *payloadReader) read(p []byte) error {
	if err := r.stop(); err != nil {
		return err
	}
	if _, err := io.ReadFull(r.file, p); err != nil {
		return fmt.Errorf("short read: %w", err)
	}
	r.sum = crc32.Update(r.sum, castagnoli, p)
	r.off += int64(len(p))
	return nil
}

func (r *payloadReader) span(s *span, to unsafe.Pointer, chunk []byte) error {
	if s.code == asIs {
		data := unsafe.Slice((*byte)(to), s.memLen)
		for len(data) > 0 {
			n := min(len(data), chunkLen)
			if err := r.read(data[:n]); err != nil {
				return err
			}
			data = data[n:]
		}
		return nil
	}
	count, elem := s.memLen/int64(s.elem), int64(s.elem)
	for done := int64(0); done < count; {
		n := min(count-done, chunkLen/2)
		if err := r.read(chunk[:2*n]); err != nil {
			return err
		}
		if err := s.code.decode(unsafe.Add(to, done*elem), unsafe.Pointer(unsafe.SliceData(chunk)), n, s.elem); err != nil {
			return err
		}
		done += n
	}
	return nil
}
