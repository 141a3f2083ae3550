package boundary

import "time"

// slowFS is a file system whose files wait before each write and read. A file is written and read in pieces of at most chunkLen,
// and a job that is given up stops between two of them.
type slowFS struct {
	FS
	delay time.Duration
}

// Create implements [FS].
func (s slowFS) Create(path string) (File, error) { return s.slow(s.FS.Create(path)) }

// Open implements [FS].
func (s slowFS) Open(path string) (File, error) { return s.slow(s.FS.Open(path)) }

func (s slowFS) slow(file File, err error) (File, error) {
	if err != nil {
		return nil, err
	}
	return slowFile{file, s.delay}, nil
}

type slowFile struct {
	File
	delay time.Duration
}

func (f slowFile) Write(p []byte) (int, error) {
	time.Sleep(f.delay)
	return f.File.Write(p)
}

func (f slowFile) Read(p []byte) (int, error) {
	time.Sleep(f.delay)
	return f.File.Read(p)
}
